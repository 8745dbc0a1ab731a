"""Checks whether a model computes a tree of rows exactly as it computes the separate rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from agentloop.train.batches import Shapes, make_batch, padded_layout
from agentloop.train.data.row import Row
from agentloop.train.forward import ScoringModel
from agentloop.train.prefixes import tree_layout

N_TOKENS = 6


@torch.no_grad()
def follows_trees(actor: ScoringModel, model: Any, n_vocab: int, tolerance: float) -> bool:
    """Decides by computing both, and by the kinds of layers, because a sliding window may be wider than a probe.

    A layer with recurrent state, or with implicit positions, shows as a difference in the log-probabilities.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    # Without `layer_types`, a window applies to every layer.
    has_window = getattr(config, "sliding_window", None) is not None and not getattr(config, "layer_types", None)
    if kinds != {"full_attention"} or has_window:
        return False
    ids = np.arange(2 * N_TOKENS, dtype=np.int32).reshape(2, N_TOKENS) * 5 % n_vocab
    # Two rows with four common tokens: a stem and two branches.
    ids[1, :4] = ids[0, :4]
    device = model.get_output_embeddings().weight.device
    batch = make_batch([(_row(ids[0]),), (_row(ids[1]),)], {}, Shapes(device))
    try:
        padded = actor(padded_layout(batch)).logprobs_N
        packed = actor(tree_layout(batch)).logprobs_N
    # Models refuse segments in many ways; all of them train on padded rows.
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError):
        return False
    return torch.allclose(padded, packed, atol=tolerance)


def _row(ids: np.ndarray[Any, np.dtype[np.int32]]) -> Row:
    mask = np.ones(N_TOKENS, dtype=np.bool_)
    return Row("probe", None, None, "", ids, mask, None, 1.0, (), None)
