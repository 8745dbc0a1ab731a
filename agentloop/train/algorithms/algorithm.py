"""What an algorithm is, and the tensors that it gets: the seam between losses and the engine (`train/engine.py`).

Shapes: B rows, T tokens of the longest, N selected tokens of all rows, in row order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from agentloop.train.data.row import Floats, Row, Unit

Figures: TypeAlias = dict[str, float]
"""Each a share of the whole optimiser step: added up over its micro-batches they are the figure of the step."""


class Need(StrEnum):
    """What an algorithm asks of rows or of the engine. A row that lacks it is refused by name."""

    logprobs = "logprobs"
    """The sampler's log-probabilities, sampled plainly."""
    groups = "groups"
    spread = "spread"
    """Advantages of turns in units of the spread of their group's rewards, as those of whole trajectories are."""
    pairs = "pairs"
    """For a task, a trajectory that passed and one that failed."""
    labels = "labels"
    """A reward."""
    old = "old"
    """Log-probabilities under the trained model before the first update on the rows: `Batch.old_N` is not None."""
    entropy = "entropy"
    """Entropies with a gradient, because the loss rewards them."""
    reference = "reference"
    """Log-probabilities under the reference: the adapter off, or a frozen copy."""
    values = "values"
    """A critic: a scalar a token. The algorithm is an `ActorCritic`."""
    rewards = "rewards"
    """A scalar a row, at its last token: the model is trained as a reward model."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch. (B, T-1) tensors describe tokens 1..T-1 as targets; (N,) are those that are selected.

    Selected are the sampled tokens; where the algorithm `scores_context`, every real token.
    """

    rows: tuple[Row, ...]
    ids_BT: Tensor
    select_BT: Tensor
    """(B, T-1) bool."""
    row_N: Tensor
    """Index of the row of each selected token."""
    action_N: Tensor
    """bool: the policy sampled it."""
    behaviour_N: Tensor
    """The sampler's log-probability; that of `old_N` where it is unknown or the token was not sampled."""
    old_N: Tensor | None
    """Log-probability before the first update on these rows; None: it was not asked for."""
    advantage_N: Tensor
    return_N: Tensor
    value_N: Tensor | None
    """The critic's values before the first update on these rows; None without a critic."""
    temperature_B: Tensor
    reward_B: Tensor
    """nan where a row has none."""
    unit_B: Tensor
    """Index of the unit of each row within this batch."""
    n_own_B: Tensor
    """Sampled tokens of the row's whole trajectory in this optimiser step."""


class Scored(NamedTuple):
    """The model's word on the selected tokens of a batch, each (N,); values None unless asked for."""

    logprobs_N: Tensor
    entropy_N: Tensor | None = None
    reference_N: Tensor | None = None
    values_N: Tensor | None = None
    """The critic's value of the state before each token."""
    rewards_B: Tensor | None = None
    """(B,): what the scalar head says at the last real token of each row."""


@dataclass(frozen=True)
class Whole:
    """Sizes of the whole optimiser step, over all micro-batches and ranks: what means are divided by."""

    n_tokens: int
    """Sampled tokens."""
    n_rows: int
    n_trajectories: int
    n_units: int
    n_selected: int
    """Selected tokens: `n_tokens`, and those of the context where the algorithm scores it."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """What `Algorithm.begin` measured."""


class RowScore(NamedTuple):
    """Sums over the sampled tokens of one row, without a gradient."""

    logprob: float
    reference: float | None
    n_tokens: int


Score: TypeAlias = Callable[[Sequence[Row]], Sequence[RowScore]]
"""Rows -> their scores under the model as it is now."""


class Algorithm(Protocol):
    """What is made better, and by how much: a loss over rows. It holds no optimiser and no model."""

    name: str
    needs: frozenset[Need]
    scores_context: bool
    """Whether the loss also looks at tokens that were not sampled."""

    def prepare(self, rows: Sequence[Row]) -> tuple[list[Unit], Counter[str]]:
        """Rows that carry a gradient, in units, with their advantages; and why the others carry none -> how many.

        Rows of one trajectory have one reward and are one member of their group. A loss that looks at whole
        trajectories makes units of all rows of one; a pair is a unit of all rows of two, the better one first.
        """
        ...

    def begin(self, units: Sequence[Unit], score: Score) -> Mapping[str, float]:
        """Constants of the optimiser step that is about to be made; {} for most algorithms.

        units: all of the step, in the same order on every rank.
        """
        ...

    def loss(self, batch: Batch, scored: Scored, whole: Whole) -> tuple[Tensor, Figures]:
        """This batch's share of the loss over the whole optimiser step, and of its figures.

        Added up, the figures go through `figures.complete`.
        """
        ...


class ActorCritic(Algorithm, Protocol):
    """An algorithm with `Need.values`: its advantages rest on a critic."""

    def with_values(self, units: Sequence[Unit], values: Sequence[Floats]) -> list[Unit]:
        """`units` with advantages, returns and `Row.values`, before the first update on them.

        values: of each row of each unit, in order, shape (T,): the critic's value of the state before each token.
        """
        ...
