"""Gradients -> one change of the weights, or none at all."""

from __future__ import annotations

import math

import torch

MAX_GRAD_NORM = 1.0


def guarded_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Clip the gradient to norm 1 and step; returns its norm before clipping.

    A gradient that is not finite changes nothing and gives nan: one bad batch must not poison the
    weights and the optimiser's moments for good.
    """
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM))
    if not math.isfinite(norm):
        return math.nan
    optimizer.step()
    return norm
