"""Features of a whole run for a learned scorer: one row for a trace, without its reward or expected actions."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from statistics import fmean

from agentloop.failures.learned.features import FEATURES, READS, rows
from agentloop.types import Trace

MEAN = (
    *("barred", "failed", "asks", "user_next", "refuses", "assumes", "echo_self", "new_facts", "objected"),
    *("length", "facts", "soft", "repeats_call"),
)
LAST = ("hard", "opens", "ends", "claims", "length", "barred")
ANY = ("calls", "hands_over", "barred")
ONCE = ("n_speakers", "n_steps", "n_soft")
OF_RUN: tuple[str, ...] = (
    *(f"mean_{name}" for name in MEAN),
    *(f"last_{name}" for name in LAST),
    *(f"any_{name}" for name in ANY),
    *ONCE,
    *("changes", "no_changes"),
)
"""Names of the columns, in order."""


def run_row(trace: Trace, steps: Sequence[Sequence[float]] | None = None) -> list[float]:
    """One row for a trace, in the order of OF_RUN. Every value is finite.

    steps: `rows(trace)`, if already computed.
    """
    if steps is None:
        steps = rows(trace)
    # A run without steps counts as one step with zeros.
    table = steps or [[0.0] * len(FEATURES)]
    column = dict(zip(FEATURES, zip(*table, strict=True), strict=True))
    own = changes(trace)
    row = [fmean(column[name]) for name in MEAN]
    row += [column[name][-1] for name in LAST]
    row += [float(max(column[name]) > 0) for name in ANY]
    row += [column[name][0] for name in ONCE]
    row += [math.log1p(len(own)), float(not own)]
    return row


def changes(trace: Trace) -> frozenset[tuple[str, str]]:
    """Successful calls whose tool names indicate a change, with canonical arguments."""
    return frozenset(
        (call.name, _canonical(call.arguments))
        for _, call, result in trace.tool_calls
        if not READS.match(call.name) and not (result is not None and _failed(result.ok, result.content))
    )


def _failed(ok: bool, content: str) -> bool:
    return not ok or content.startswith("Error")


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
