"""Units of an optimiser step -> the micro-batches of each rank, with about equal work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from agentloop.train.batches import micro_batches
from agentloop.train.data.row import Unit
from agentloop.train.prefixes import Bundle, Costs, bundles

Item = TypeVar("Item")


class MicroBatch(NamedTuple):
    """The units of one micro-batch."""

    units: list[Unit]
    is_tree: bool
    """True if common prefixes of rows are stored once; else rows are padded."""


def parts_of(
    units: Sequence[Unit], max_tokens: int, costs: Costs | None = None, n_ranks: int = 1
) -> list[list[MicroBatch]]:
    """The micro-batches of each rank; a rank may have none.

    costs: of the model, to share prefixes; None shares none. Every rank computes the same plan from the same units.
    """
    together: list[Bundle] = []
    alone = list(units)
    if costs is not None:
        n_tokens = sum(len(row) for unit in units for row in unit)
        # A tree larger than the share of a rank would leave other ranks idle.
        together, alone = bundles(units, costs, min(max_tokens, -(-n_tokens // n_ranks)))
    work = costs or Costs()
    # Trees first, because single rows are smaller and even out the rest.
    trees = deal(together, [bundle.cost for bundle in together], [0.0] * n_ranks)
    loads = [sum(bundle.cost for bundle in share) for share in trees]
    rows = deal(alone, [sum(work.row(len(row)) for row in unit) for unit in alone], loads)
    return [
        [
            *(MicroBatch(part, is_tree=True) for part in _filled(own_trees, max_tokens)),
            *(MicroBatch(part, is_tree=False) for part in micro_batches(own_rows, max_tokens)),
        ]
        for own_trees, own_rows in zip(trees, rows, strict=True)
    ]


def deal(items: Sequence[Item], costs: Sequence[float], loads: Sequence[float]) -> list[list[Item]]:
    """Assigns items to ranks with current `loads`: the most expensive first, each to the least loaded rank, keeping
    order."""
    totals = list(loads)
    shares: list[list[int]] = [[] for _ in loads]
    # The greedy rule of Graham (1969) for machines of equal speed.
    for index in sorted(range(len(items)), key=lambda index: -costs[index]):
        rank = totals.index(min(totals))
        totals[rank] += costs[index]
        shares[rank].append(index)
    return [[items[index] for index in sorted(share)] for share in shares]


def _filled(bundles: Sequence[Bundle], max_tokens: int) -> list[list[Unit]]:
    """Units of bundles that fit into one micro-batch; trees need no padding."""
    parts: list[list[Unit]] = []
    size = 0
    for bundle in bundles:
        size += bundle.n_tokens
        if parts and size <= max_tokens:
            parts[-1] += bundle.units
        else:
            parts.append(list(bundle.units))
            size = bundle.n_tokens
    return parts
