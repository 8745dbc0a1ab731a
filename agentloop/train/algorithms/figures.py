"""Figures of a loss: shares that sum over the micro-batches of an optimiser step, and values derived from the sums."""

from __future__ import annotations

import torch
from torch import Tensor

from agentloop.train.algorithms.algorithm import Figures


def shares(terms: dict[str, Tensor]) -> Figures:
    """Scalars without gradients, in one transfer from the device."""
    if not terms:
        return {}
    values = torch.stack([term.detach().float() for term in terms.values()])
    return dict(zip(terms, values.tolist(), strict=True))


def complete(figures: Figures) -> Figures:
    """The figures of a whole step, including those that are not sums.

    `effective`: the effective sample share, (sum w)^2 / (n sum w^2) of the importance weights w between the trained
    model and the sampler; 1 on policy. `clip/positive`, `clip/negative`: share among tokens with an advantage of that
    sign.
    """
    whole = dict(figures)
    square = whole.pop("weight_square", 0.0)
    if square > 0.0:
        whole["effective"] = whole["weight"] ** 2 / square
    whole.pop("weight", None)
    for sign in ("positive", "negative"):
        n_share = whole.pop(sign, 0.0)
        clipped = whole.pop(f"clip/{sign}", None)
        if clipped is not None and n_share > 0.0:
            whole[f"clip/{sign}"] = clipped / n_share
    return whole
