"""GRPO with a clipped ratio, token-mean loss and an entropy floor: one file, readable alone.

Trains on what the current policy did moments ago. It does not roll out, judge or choose tasks.
Source: GRPO, arXiv:2402.03300; token mean and the asymmetric clip, DAPO, arXiv:2503.14476.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentloop.errors import TrainingError
from agentloop.train.logprobs import TokenBatch, entropy, make_batch, parts, token_logprobs
from agentloop.train.sft import sft_loss
from agentloop.train.update import guarded_step
from agentloop.types import Sample

MICRO_ROWS = 16
"""Rows of one forward pass."""


@dataclass(frozen=True)
class GrpoSettings:
    """What can be tuned, with the values that the demo's measurements ended at."""

    learning_rate: float = 4e-4
    clip_low: float = 0.2
    clip_high: float = 0.28
    """Larger than clip_low, so that a rare good action can grow (DAPO's clip-higher)."""
    entropy_floor: float = 0.02
    """Nats a token; below it an entropy bonus pushes back, above it there is none."""
    entropy_weight: float = 0.05
    max_rows: int = 64
    """Rows of one optimiser step; the samples of a call make several."""


def clipped_objective(
    logprobs_N: Tensor, behaviour_N: Tensor, advantage_N: Tensor, *, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """(min(r A, clip(r, 1 - low, 1 + high) A) per token (N,), the ratio r (N,)).

    The log-ratio is clamped to +-20 before the exponential, so that no ratio overflows.
    """
    ratio_N = (logprobs_N - behaviour_N).clamp(-20.0, 20.0).exp()
    clipped_N = ratio_N.clamp(1.0 - low, 1.0 + high)
    return torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N), ratio_N


class Grpo:
    """Holds the optimiser of one model across steps."""

    name = "grpo"

    def __init__(self, model: PreTrainedModel, pad: int, settings: GrpoSettings | None = None) -> None:
        self.model = model
        self.pad = pad
        self.settings = settings or GrpoSettings()
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._entropy = math.inf  # nats a token, as it was at the latest step

    def step(self, samples: Sequence[Sample], *, rate: float = 1.0) -> dict[str, float]:
        """One pass over `samples`, which carry advantages, in the order given, at `rate` times the learning rate.

        Metrics are token means. Raises TrainingError for rows sampled at different temperatures.
        Each optimiser step sees a mixture: were rows sorted by length to save padding, an update
        would see a group's failures without its successes. Padding is saved within the step.
        """
        if len({row.temperature for row in samples}) > 1:
            raise TrainingError(
                "rows of one step were sampled at different temperatures; train them in steps of their own"
            )
        total: defaultdict[str, float] = defaultdict(float)
        grad_norm = 0.0
        self._set_rate(rate)
        for rows in parts(samples, self.settings.max_rows) if samples else []:
            norm = self._update(rows, total)
            grad_norm = max(grad_norm, 0.0 if math.isnan(norm) else norm)
            total["skipped_steps"] += math.isnan(norm)
        n = max(total["n_tokens"], 1)
        return {
            "entropy": total["entropy"] / n,
            "clip_fraction": total["clipped"] / n,
            "kl": total["kl"] / n,
            "grad_norm": grad_norm,
            "skipped_steps": total["skipped_steps"],
            "n_tokens": total["n_tokens"],
        }

    def imitate(self, samples: Sequence[Sample], *, rate: float = 1.0) -> dict[str, float]:
        """One supervised step on rows that once succeeded: how a pool that only fails is revived."""
        self._set_rate(rate)
        loss, _ = sft_loss(self.model, samples, self.pad, context_weight=0.0)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = guarded_step(self.model, self.optimizer)
        return {"grad_norm": norm, "skipped_steps": float(math.isnan(norm))}

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * rate

    def _update(self, rows: Sequence[Sample], total: defaultdict[str, float]) -> float:
        """One optimiser step: gradients of rows of similar length, added up; see `guarded_step`."""
        self.optimizer.zero_grad()
        n_tokens = sum(sum(row.action_mask[1:]) for row in rows)
        for part in parts(sorted(rows, key=lambda row: len(row.token_ids)), MICRO_ROWS):
            loss = self._loss(make_batch(part, self.pad), rows[0].temperature, n_tokens, total)
            loss.backward()  # type: ignore[no-untyped-call]
        total["n_tokens"] += n_tokens
        self._entropy = total["entropy"] / max(total["n_tokens"], 1)
        return guarded_step(self.model, self.optimizer)

    def _loss(self, batch: TokenBatch, temperature: float, n_tokens: int, total: defaultdict[str, float]) -> Tensor:
        """This batch's share of the mean over `n_tokens` tokens, which may be more than it has itself."""
        s = self.settings
        logprobs_N, logps_NV = token_logprobs(self.model, batch.ids_BT, batch.action_BT, temperature)
        behaviour_N = batch.behaviour_BT[batch.action_BT]
        advantage_N = batch.advantage_B[:, None].expand_as(batch.action_BT)[batch.action_BT]
        objective_N, ratio_N = clipped_objective(logprobs_N, behaviour_N, advantage_N, low=s.clip_low, high=s.clip_high)
        entropy_N = entropy(logps_NV)
        # Whether the floor is undercut was measured on whole steps before: a batch's own mean would
        # make the gradient depend on how rows are dealt out to batches.
        weight = s.entropy_weight if self._entropy < s.entropy_floor else 0.0
        with torch.no_grad():
            total["entropy"] += float(entropy_N.sum())
            total["clipped"] += int(((ratio_N < 1 - s.clip_low) | (ratio_N > 1 + s.clip_high)).sum())
            total["kl"] += float((ratio_N - 1 - ratio_N.log()).sum())
        return -(objective_N.sum() + weight * entropy_N.sum()) / n_tokens
