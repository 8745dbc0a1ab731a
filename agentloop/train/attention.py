"""Attention over segments: each token of a sequence attends to the earlier tokens of the same row, wherever they are.

Registered with transformers under one name. Without segments it is their scaled dot product attention, so a model with
it samples and scores as before. Shapes: L tokens of a sequence, R segments, Q queries and K keys of the longest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "agentloop_segments"
PLAIN = "sdpa"


class Bucket(NamedTuple):
    """Segments of similar size for one call of attention. Indices refer to the sequence; padding is 0."""

    queries_RQ: Tensor
    keys_RK: Tensor
    mask_RQK: Tensor
    """bool: the query attends to the key."""


class Segments(NamedTuple):
    """All tokens of a sequence. Each is a query in exactly one bucket."""

    buckets: tuple[Bucket, ...]
    output_L: Tensor
    """Index of each token among the queries of all buckets, in sequence."""


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> Any:
    """(output (1, L, heads, width), None), the interface of transformers; query (1, heads, L, width)."""
    segments: Segments | None = settings.pop("segments", None)
    if segments is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    # With grouped queries, several heads share the keys and values of one.
    n_repeats = query.shape[1] // key.shape[1]
    query_L, key_L, value_L = (each[0].transpose(0, 1) for each in (query, key, value))
    outputs = []
    for queries_RQ, keys_RK, mask_RQK in segments.buckets:
        keys, values = (
            _picked(each, keys_RK).repeat_interleave(n_repeats, 1) if n_repeats > 1 else _picked(each, keys_RK)
            for each in (key_L, value_L)
        )
        part = functional.scaled_dot_product_attention(
            _picked(query_L, queries_RQ), keys, values, attn_mask=mask_RQK[:, None], scale=settings.get("scaling")
        )
        outputs.append(part.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, segments.output_L)[None], None


def _picked(values_L: Tensor, index: Tensor) -> Tensor:
    """(L, heads, width) at `index` (R, n) -> (R, heads, n, width)."""
    flat = values_L.reshape(len(values_L), -1).index_select(0, index.flatten())
    return flat.view(*index.shape, *values_L.shape[1:]).transpose(1, 2)


def use_segments(model: Any) -> bool:
    """Enables attention by segments in a model; False if its attention is not the plain one."""
    if model.config._attn_implementation not in (PLAIN, NAME):
        return False
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return bool(model.config._attn_implementation == NAME)
