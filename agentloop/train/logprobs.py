"""Samples -> tensors -> log-probabilities under the model being trained.

Rows are padded on the right; causal attention keeps padding out of every real token, so no mask is
needed. Shapes: B rows, T tokens, N selected tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentloop.types import Sample


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch; the four (B, T) tensors describe tokens 1..T-1 as targets, shifted already."""

    ids_BT: Tensor
    """All tokens, (B, T) long."""
    action_BT: Tensor
    """(B, T-1) bool: the target was sampled by the policy."""
    real_BT: Tensor
    """(B, T-1) bool: the target is not padding."""
    behaviour_BT: Tensor
    """(B, T-1) float: the sampler's log-probability of the target."""
    advantage_B: Tensor


def make_batch(samples: Sequence[Sample], pad: int) -> TokenBatch:
    """Pad `samples` on the right to the longest of them."""
    n = max(len(s.token_ids) for s in samples)

    def padded(rows: Iterator[Sequence[float]], fill: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([[*row, *[fill] * (n - len(row))] for row in rows], dtype=dtype)

    real = padded(([1] * len(s.token_ids) for s in samples), 0, torch.bool)
    return TokenBatch(
        ids_BT=padded((s.token_ids for s in samples), pad, torch.long),
        action_BT=padded((s.action_mask for s in samples), 0, torch.bool)[:, 1:],
        real_BT=real[:, 1:],
        behaviour_BT=padded((s.logprobs for s in samples), 0.0, torch.float32)[:, 1:],
        advantage_B=torch.tensor([s.advantage for s in samples]),
    )


def parts(samples: Sequence[Sample], max_rows: int) -> list[Sequence[Sample]]:
    """`samples` in parts of nearly equal size, at most `max_rows` each, in the order given."""
    n = -(-len(samples) // max_rows)
    return [samples[i * len(samples) // n : (i + 1) * len(samples) // n] for i in range(n)]


def token_logprobs(
    model: PreTrainedModel, ids_BT: Tensor, select_BT: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(log-probabilities (N,) of the selected targets, their distributions (N, V) in nats).

    ids_BT: (B, T). select_BT: (B, T-1) bool over targets. The head runs on selected positions only.
    """
    hidden = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state[:, :-1][select_BT]
    logps_NV = torch.log_softmax(model.lm_head(hidden) / temperature, dim=-1)
    targets_N = ids_BT[:, 1:][select_BT]
    return logps_NV.gather(1, targets_N[:, None])[:, 0], logps_NV


def entropy(logps_NV: Tensor) -> Tensor:
    """Entropy (N,) in nats of each distribution."""
    return -(logps_NV.exp() * logps_NV).sum(-1)
