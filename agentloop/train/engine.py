"""The one training step under every algorithm: micro-batches, a loss, gradients added up, one change of the weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from agentloop.errors import TrainingError
from agentloop.train.algorithms.algorithm import Algorithm, Batch, Need, RowScore, Scored, Whole
from agentloop.train.batches import (
    Micro,
    Shapes,
    check_rows,
    distinct_rows,
    make_batch,
    micro_batches,
    own_tokens,
    padded_layout,
    whole_of,
)
from agentloop.train.data.row import Floats, Row, Unit
from agentloop.train.forward import Asked
from agentloop.train.mismatch import Mismatch, Tolerance, mismatch_of, refuse
from agentloop.train.model import Trainable, score

MAX_SKIPPED = 5
"""Steps in a row without a finite gradient that end the training."""


@dataclass(frozen=True)
class EngineSettings:
    """How gradients become changes."""

    learning_rate: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_steps: int = 0
    """Steps over which the rate rises to its full value."""
    max_grad_norm: float = 1.0
    max_tokens: int = 8192
    """Of a micro-batch, with its padding."""


class Engine:
    """Model, algorithm and optimiser of one training."""

    def __init__(
        self, trainable: Trainable, algorithm: Algorithm, settings: EngineSettings = EngineSettings(), *, pad: int = 0
    ) -> None:
        """pad: id that fills shorter rows; no real token looks at it.

        With all weights and an algorithm that needs a reference, the weights as they are now are frozen as it.
        """
        self.trainable = trainable
        self.algorithm = algorithm
        self.settings = settings
        self.n_steps = 0
        """Updates so far, skipped ones too."""
        self.n_skipped = 0
        """Skipped updates since the last one that was made."""
        if Need.reference in algorithm.needs:
            trainable.keep_reference()
        self.optimizer = torch.optim.AdamW(
            [value for _, value in trainable.parameters()],
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
        )
        self._shapes = Shapes(trainable.device, pad, algorithm.scores_context)

    def step(self, units: Sequence[Unit], rate: float = 1.0) -> dict[str, float]:
        """One update on `units` at `rate` times the learning rate; the algorithm's figures and the step's own.

        A loss or gradient that is not finite changes nothing and is counted as `skipped`. Raises TrainingError for the
        fifth such step in a row, for no units, and for rows that the model cannot read.
        """
        if not units:
            raise TrainingError("a step needs at least one row with a gradient; skip the update")
        rows = distinct_rows(units)
        check_rows(rows, self.trainable.n_vocab, self.trainable.context)
        constants = self.algorithm.begin(units, self._row_scores)
        whole = whole_of(units, self.algorithm.scores_context, constants)
        self.optimizer.zero_grad()
        figures: Counter[str] = Counter()
        for micro in self._micros(units, own_tokens(units), self._shapes):
            self._accumulate(micro, whole, figures)
        norm = self._update(figures, rate)
        n_tokens = sum(len(row) for row in rows)
        return {**figures, "gradient": norm, "skipped": float(math.isnan(norm)), "tokens/train": float(n_tokens)}

    def score(self, rows: Sequence[Row]) -> list[Row]:
        """`rows` with `old_logprobs` of their sampled tokens (all real tokens where the algorithm scores them)."""
        check_rows(rows, self.trainable.n_vocab, self.trainable.context)
        logprobs = self._logprobs(rows, self._shapes)
        return [replace(row, old_logprobs=values) for row, values in zip(rows, logprobs, strict=True)]

    def mismatch(self, rows: Sequence[Row], tolerance: Tolerance | None = None) -> Mismatch:
        """How far the model's log-probabilities are from the sampler's on fresh rows, and where they first part.

        Rows that are scored already are not scored again. tolerance: the default follows from the type of computation.
        """
        fresh = [row for row in rows if row.old_logprobs is None]
        by_id = {id(row): each for row, each in zip(fresh, self.score(fresh), strict=True)} if fresh else {}
        return mismatch_of([by_id.get(id(row), row) for row in rows], tolerance or self.tolerance)

    def guard(self, rows: Sequence[Row], tolerance: Tolerance | None = None) -> Mismatch:
        """The same, before the first update on fresh rows. Raises TrainingError beyond the tolerance."""
        mismatch = self.mismatch(rows, tolerance)
        refuse(mismatch, tolerance or self.tolerance)
        return mismatch

    @property
    def tolerance(self) -> Tolerance:
        """What the precision of the computation explains."""
        return Tolerance.of(self.trainable.dtype)

    def _micros(self, units: Sequence[Unit], own: Mapping[str, int], shapes: Shapes) -> Iterator[Micro]:
        for part in micro_batches(units, self.settings.max_tokens):
            batch = make_batch(part, own, shapes)
            yield Micro(batch, padded_layout(batch))

    def _accumulate(self, micro: Micro, whole: Whole, figures: Counter[str]) -> None:
        """Add the gradient and the figures of a micro-batch."""
        needs = self.algorithm.needs
        reference_N = None
        if Need.reference in needs:
            reference_N = self.trainable.reference(micro.layout)
        asked = Asked(entropy=True, values=Need.values in needs, rewards=Need.rewards in needs)
        with self.trainable.precision():
            scored = score(self.trainable.actor, micro.layout, asked)._replace(reference_N=reference_N)
        loss, shares = self.algorithm.loss(_with_behaviour(micro.batch, scored), scored, whole)
        figures.update(shares)
        loss.backward()  # type: ignore[no-untyped-call]

    def _update(self, figures: Mapping[str, float], rate: float) -> float:
        """Clip the gradient and change the weights; its norm before clipping, nan for a step that was skipped."""
        self.n_steps += 1
        warmth = min(1.0, self.n_steps / max(self.settings.warmup_steps, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * rate * warmth
        parameters = [value for _, value in self.trainable.parameters()]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm))
        if math.isfinite(norm) and math.isfinite(figures.get("loss", 0.0)):
            self.optimizer.step()
            self.n_skipped = 0
            return norm
        self.n_skipped += 1
        if self.n_skipped >= MAX_SKIPPED:
            raise TrainingError(
                f"{MAX_SKIPPED} updates in a row had no finite gradient; lower the learning rate or look at the rewards"
            )
        return math.nan

    def _row_scores(self, rows: Sequence[Row]) -> list[RowScore]:
        """Sums over the sampled tokens of each row under the model and, where it is needed, the reference."""
        shapes = replace(self._shapes, scores_context=False)
        needs_reference = Need.reference in self.algorithm.needs
        own = self._logprobs(rows, shapes)
        reference = self._logprobs(rows, shapes, of_reference=True) if needs_reference else None
        scores = []
        for index, row in enumerate(rows):
            other = None if reference is None else float(reference[index].sum(dtype=np.float64))
            scores.append(RowScore(float(own[index].sum(dtype=np.float64)), other, int(row.action_mask[1:].sum())))
        return scores

    @torch.no_grad()
    def _logprobs(self, rows: Sequence[Row], shapes: Shapes, *, of_reference: bool = False) -> list[Floats]:
        """(T,) of each row, 0 where a token is not selected."""
        by_row: dict[int, Floats] = {}
        units = [(row,) for row in distinct_rows([tuple(rows)])]
        for micro in self._micros(units, {}, shapes):
            if of_reference:
                logprobs_N = self.trainable.reference(micro.layout)
            else:
                with self.trainable.precision():
                    logprobs_N = score(self.trainable.actor, micro.layout).logprobs_N
            by_row |= spread(micro.batch, logprobs_N)
        return [by_row[id(row)] for row in rows]


def spread(batch: Batch, values_N: Tensor) -> dict[int, Floats]:
    """Values of selected tokens -> id of the row -> an array of its length, 0 elsewhere."""
    plain_BT = torch.zeros(batch.ids_BT.shape, dtype=torch.float32, device=values_N.device)
    plain_BT[:, 1:][batch.select_BT] = values_N.float()
    array_BT = plain_BT.cpu().numpy()
    return {id(row): array_BT[index, : len(row)].copy() for index, row in enumerate(batch.rows)}


def _with_behaviour(batch: Batch, scored: Scored) -> Batch:
    """`batch` with the model's own log-probability where the sampler's is unknown: a ratio of 1."""
    known_N = torch.where(batch.behaviour_N.isnan(), scored.logprobs_N.detach(), batch.behaviour_N)
    return replace(batch, behaviour_N=known_N)
