"""Rows that begin alike -> one sequence in which each shared token stands once.

The rows of a group share their prompt, and forks and sub-agents more than that. As a tree of tokens, written in
depth-first order, they are one sequence: a token looks at its ancestors alone, and counts its position from the root.
The hidden states, and so log-probabilities and gradients, are those of the rows one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from agentloop.errors import ConfigError
from agentloop.train.algorithms.algorithm import Batch
from agentloop.train.data.row import Ids, Row, Unit
from agentloop.train.forward import Actor, Layout

MASKED_COST = 1.5
"""Attention with a mask of its own, over plain causal attention, per pair of tokens."""
MIN_SAVING = 1.2
"""Rows must cost so many times what their tree costs, or they are padded: an estimate can be wrong."""
Index = NDArray[np.int64]


@dataclass(frozen=True)
class Costs:
    """Floating point operations of a forward pass."""

    token: float = 1.0
    """For each token in linear layers."""
    pair: float = 0.0
    """For each pair of a token and one that it looks at."""

    @classmethod
    def of(cls, model: Any) -> Costs:
        """Of a causal model, from its sizes."""
        config = model.config.get_text_config()
        layers = list(model.base_model.parameters())
        outside = model.get_input_embeddings().weight.numel()
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        n_linear = sum(value.numel() for value in layers) - outside
        return cls(2.0 * n_linear, 4.0 * config.num_hidden_layers * config.num_attention_heads * width)

    def row(self, length: int) -> float:
        """Of a row by itself, which looks at half of its pairs."""
        return self.token * length + self.pair * length * length / 2

    def tree(self, length: int) -> float:
        """Of a tree of so many tokens, whose masked pairs are computed too."""
        return self.token * length + self.pair * MASKED_COST * length * length


class Tree(NamedTuple):
    """Rows as one sequence of L tokens."""

    ids_L: Ids
    positions_L: Index
    ends_L: Index
    """The index after the last token that comes from each token."""
    places: list[Index]
    """(T,) of each row, in the order given: where its tokens are."""


def tree_of(rows: Sequence[Row]) -> Tree:
    """The tree of the rows' tokens, depth first."""
    ids: list[Ids] = []
    positions: list[Index] = []
    ends = np.zeros(sum(len(row) for row in rows), dtype=np.int64)
    places: list[Index] = [np.zeros(0, dtype=np.int64)] * len(rows)
    before = np.zeros(0, dtype=np.int32)
    path = np.zeros(0, dtype=np.int64)
    size = 0
    # In the order of their bytes, rows that share a beginning are neighbours.
    for index in sorted(range(len(rows)), key=lambda index: rows[index].token_ids.tobytes()):
        tokens = rows[index].token_ids
        shared = n_shared(before, tokens)
        ends[path[shared:]] = size
        n_new = len(tokens) - shared
        path = np.concatenate([path[:shared], np.arange(size, size + n_new)])
        ids.append(tokens[shared:])
        positions.append(np.arange(shared, len(tokens)))
        places[index] = path
        before = tokens
        size += n_new
    ends[path] = size
    return Tree(np.concatenate(ids), np.concatenate(positions), ends[:size], places)


def tree_size(units: Sequence[Unit]) -> int:
    """Tokens of the tree of all rows of `units`."""
    return len(tree_of([row for unit in units for row in unit]).ids_L)


def n_shared(one: Ids, other: Ids) -> int:
    """Tokens with which both begin."""
    n = min(len(one), len(other))
    differing = np.flatnonzero(one[:n] != other[:n])
    return int(differing[0]) if len(differing) else n


def bundles(units: Sequence[Unit], costs: Costs, max_tokens: int) -> tuple[list[list[Unit]], list[Unit]]:
    """(units whose rows are worth a tree together, units that are not), from the units of any groups.

    Trees have at most `max_tokens` tokens. A unit with rows of several groups stays by itself.
    """
    groups: dict[str | None, list[Unit]] = {}
    for unit in units:
        names = {row.group for row in unit}
        groups.setdefault(unit[0].group if len(names) == 1 else None, []).append(unit)
    alone = groups.pop(None, [])
    together = []
    for group in groups.values():
        for part in _parts(group, costs, max_tokens):
            if _saves(part, costs):
                together.append(part)
            else:
                alone += part
    return together, alone


def _parts(units: list[Unit], costs: Costs, max_tokens: int) -> list[list[Unit]]:
    """The units of a group, where another tree begins once a longer one would cost more."""
    parts: list[list[Unit]] = []
    size = 0
    before = np.zeros(0, dtype=np.int32)
    for unit in sorted(units, key=lambda unit: unit[0].token_ids.tobytes()):
        n_whole = sum(len(row) for row in unit)
        n_new = 0
        for row in unit:
            n_new += len(row) - n_shared(before, row.token_ids)
            before = row.token_ids
        grown = size + n_new
        if parts and grown <= max_tokens and costs.tree(grown) - costs.tree(size) < costs.tree(n_whole):
            parts[-1].append(unit)
            size = grown
        else:
            parts.append([unit])
            size = n_whole
    return parts


def _saves(units: Sequence[Unit], costs: Costs) -> bool:
    rows = [row for unit in units for row in unit]
    if len(rows) < 2:
        return False
    size = tree_size(units)
    return sum(costs.row(len(row)) for row in rows) > MIN_SAVING * costs.tree(size)


def batches_of_trees(bundles: Sequence[list[Unit]], max_tokens: int) -> list[list[list[Unit]]]:
    """Bundles of like size together, at most `max_tokens` with padding in a micro-batch."""
    sizes = [tree_size(bundle) for bundle in bundles]
    batches: list[list[list[Unit]]] = []
    for index in sorted(range(len(bundles)), key=lambda index: sizes[index]):
        if batches and (len(batches[-1]) + 1) * sizes[index] <= max_tokens:
            batches[-1].append(bundles[index])
        else:
            batches.append([bundles[index]])
    return batches


def tree_layout(batch: Batch, bundles: Sequence[Sequence[Unit]], pad: int) -> Layout:
    """One tree a sequence, padded on the right. `batch` has the rows of `bundles`, in their order."""
    device = batch.ids_BT.device
    trees = [tree_of([row for unit in bundle for row in unit]) for bundle in bundles]
    n_tokens = max(len(tree.ids_L) for tree in trees)
    ids_SL = np.full((len(trees), n_tokens), pad, dtype=np.int64)
    positions_SL = np.zeros((len(trees), n_tokens), dtype=np.int64)
    # Padding looks at itself, because attention over nothing is not a number.
    ends_SL = np.tile(np.arange(1, n_tokens + 1), (len(trees), 1))
    for index, tree in enumerate(trees):
        size = len(tree.ids_L)
        ids_SL[index, :size] = tree.ids_L
        positions_SL[index, :size] = tree.positions_L
        ends_SL[index, :size] = tree.ends_L
    places = [place + index * n_tokens for index, tree in enumerate(trees) for place in tree.places]
    source_BT = np.zeros(batch.select_BT.shape, dtype=np.int64)
    for index, place in enumerate(places):
        source_BT[index, : len(place) - 1] = place[:-1]
    row_N, place_N = batch.select_BT.nonzero(as_tuple=True)
    ends = torch.from_numpy(ends_SL).to(device)
    order = torch.arange(n_tokens, device=device)
    return Layout(
        ids_SL=torch.from_numpy(ids_SL).to(device),
        positions_SL=torch.from_numpy(positions_SL).to(device),
        mask_SLL=(order[None, :, None] >= order[None, None, :]) & (order[None, :, None] < ends[:, None, :]),
        source_N=torch.from_numpy(source_BT).to(device)[batch.select_BT],
        target_N=batch.ids_BT[row_N, place_N + 1],
        temperature_N=batch.temperature_B[row_N],
        last_B=torch.tensor([int(place[-1]) for place in places], device=device),
    )


@torch.no_grad()
def follows_trees(actor: Actor, model: Any, n_vocab: int, tolerance: float) -> bool:
    """Whether a model computes a tree as it computes its rows: with full attention, and positions that it is given.

    Decided by doing both: a layer with a state of its own, or a position of its own, shows.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (getattr(config, "sliding_window", None) and "layer_types" not in vars(config)):
        return False
    device = model.get_output_embeddings().weight.device
    rows = torch.arange(12, device=device).reshape(2, 6) * 5 % n_vocab
    rows[1, :4] = rows[0, :4]
    ids_SL = torch.cat([rows[0], rows[1, 4:]])[None]
    positions_SL = torch.tensor([[0, 1, 2, 3, 4, 5, 4, 5]], device=device)
    ends = torch.tensor([8, 8, 8, 8, 6, 6, 8, 8], device=device)
    order = torch.arange(8, device=device)
    mask_SLL = ((order[:, None] >= order[None]) & (order[:, None] < ends[None]))[None]
    target_N = rows[:, 1:].reshape(-1)
    ones_N = torch.ones(10, device=device)
    last_B = torch.tensor([5, 7], device=device)
    plain_N = torch.tensor([0, 1, 2, 3, 4, 6, 7, 8, 9, 10], device=device)
    source_N = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 6], device=device)
    try:
        padded = actor(Layout(rows, None, None, plain_N, target_N, ones_N, last_B)).logprobs_N
        packed = actor(Layout(ids_SL, positions_SL, mask_SLL, source_N, target_N, ones_N, last_B)).logprobs_N
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError, ConfigError):
        return False
    return torch.allclose(padded, packed, atol=tolerance)
