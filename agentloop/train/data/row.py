"""A row: one chain of turns of a policy, as token ids, with everything that an algorithm may ask of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int32]
Mask: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float32]


class Turn(NamedTuple):
    """One answer of the policy within a row: tokens `start` to `end` (exclusive), all of them sampled."""

    start: int
    end: int
    trace: str
    """Id of the trace that the step is of; that of a sub-agent differs from the row's trajectory."""
    step: int
    version: int | None
    """Policy version that sampled it; None where nobody knows."""


@dataclass(frozen=True, eq=False)
class Row:
    """A chain of turns in which each prompt begins with the ids before it. Arrays have shape (T,), T tokens.

    Every sampled token of a trained trace is masked in exactly one row. A trajectory is a whole trace with its
    sub-agents; it has one reward, and as many rows as its prompts did not go on from each other.
    """

    trajectory: str
    """Id of the trace at the root."""
    group: str | None
    """Of trajectories that may be compared: one task under one version. None where nobody says."""
    task: str | None
    pool: str
    token_ids: Ids
    action_mask: Mask
    """True where the policy sampled the token, False for prompts and tool results."""
    logprobs: Floats | None
    """The sampler's log-probability in nats of each sampled token, 0 elsewhere; None where it is unknown."""
    temperature: float
    """At which it was sampled; 1.0 where nobody sampled it for us."""
    turns: tuple[Turn, ...]
    reward: float | None
    """Of the trajectory, in [0, 1]; None without one."""
    advantages: Floats | None = None
    """Of each token, 0 where the mask is False; None before an algorithm gave some."""
    old_logprobs: Floats | None = None
    """Log-probabilities under the trained model before the first update on this row; None: not scored yet."""
    returns: Floats | None = None
    """Targets of a critic, one a token; None without a critic."""

    values: Floats | None = None
    """The critic's value of the state before each token, before the first update on this row; None without a critic."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def n_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return int(self.action_mask.sum())

    def with_advantage(self, advantage: float) -> Row:
        """The same value for each sampled token."""
        return replace(self, advantages=np.where(self.action_mask, np.float32(advantage), np.float32(0.0)))


Unit: TypeAlias = tuple[Row, ...]
"""Rows that one micro-batch must hold together: one row, all of a trajectory, or those of a pair of trajectories.

The rows of a trajectory stand side by side; those of the better one of a pair come first.
"""
