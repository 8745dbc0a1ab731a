"""Supervised fine-tuning on traces: the warm start, and the way to revive a dead task pool.

Imitates every action it is given, good or bad; choosing the traces is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentloop.train.logprobs import make_batch, token_logprobs
from agentloop.train.update import guarded_step
from agentloop.types import Sample

CONTEXT_WEIGHT = 0.1
"""Weight of tokens that were not sampled. Predicting them too is what teaches a small model to copy."""


def sft_loss(
    model: PreTrainedModel, samples: Sequence[Sample], pad: int, context_weight: float
) -> tuple[Tensor, float]:
    """(weighted mean negative log-likelihood, its mean over action tokens alone, in nats)."""
    batch = make_batch(samples, pad)
    select = batch.real_BT if context_weight else batch.action_BT
    logprobs_N, _ = token_logprobs(model, batch.ids_BT, select)
    action_N = batch.action_BT[select]
    weight_N = torch.where(action_N, 1.0, context_weight)
    action_nll = -float(logprobs_N.detach()[action_N].mean())
    return -(logprobs_N * weight_N).sum() / weight_N.sum(), action_nll


class Sft:
    """Holds the optimiser of one warm start; the rate rises over the first steps and then stays."""

    name = "sft"

    def __init__(
        self, model: PreTrainedModel, pad: int, *, learning_rate: float = 2e-3, warmup_steps: int = 50
    ) -> None:
        self.model = model
        self.pad = pad
        self._rate = learning_rate
        self._warmup = warmup_steps
        self.n_steps = 0
        """Updates so far; set it to go on from a checkpoint."""
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)

    def step(self, samples: Sequence[Sample], *, rate: float = 1.0) -> dict[str, float]:
        """One update on `samples`, at `rate` times the learning rate; metrics by name.

        A non-finite gradient changes nothing and is counted.
        """
        self.n_steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate * rate * min(1.0, self.n_steps / self._warmup)
        loss, action_nll = sft_loss(self.model, samples, self.pad, CONTEXT_WEIGHT)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = guarded_step(self.model, self.optimizer)
        return {"loss": action_nll, "grad_norm": norm, "skipped_steps": float(not math.isfinite(norm))}
