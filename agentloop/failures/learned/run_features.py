"""What a learned scorer sees of a whole run: one row for a trace, and how it agrees with other runs of its task.

Runs of one task that changed different things cannot all be right: that says more about a run whose outcome
nobody knows than anything in it. Nothing here knows a reward or an expected action.
"""

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
    *("agrees", "overlaps", "others_change"),
)
"""Names of the columns, in order."""


def run_row(trace: Trace, others: Sequence[Trace] = (), steps: Sequence[Sequence[float]] | None = None) -> list[float]:
    """One row for a trace, in the order of OF_RUN; every value is finite.

    others: further runs of the same task, whatever became of them; without any the last three columns say what is
    expected of a run that nobody disagrees with. steps: `rows(trace)`, where it was computed already.
    """
    table = rows(trace) if steps is None else steps
    column = dict(zip(FEATURES, zip(*table, strict=True), strict=True)) if table else {}
    own = changes(trace)
    row = [fmean(column[name]) if column else 0.0 for name in MEAN]
    row += [column[name][-1] if column else 0.0 for name in LAST]
    row += [float(max(column[name]) > 0) if column else 0.0 for name in ANY]
    row += [column[name][0] if column else 0.0 for name in ONCE]
    row += [math.log1p(len(own)), float(not own)]
    theirs = [changes(other) for other in others]
    row += [
        fmean(float(own == other) for other in theirs) if theirs else 1.0,
        fmean(_overlap(own, other) for other in theirs) if theirs else 1.0,
        math.log1p(fmean(len(other) for other in theirs) if theirs else len(own)),
    ]
    return row


def changes(trace: Trace) -> frozenset[tuple[str, str]]:
    """Calls that went well and, going by the tool's name, change something; arguments in one spelling."""
    return frozenset(
        (call.name, _canonical(call.arguments))
        for _, call, result in trace.tool_calls
        if not READS.match(call.name) and not (result is not None and _failed(result.ok, result.content))
    )


def _failed(ok: bool, content: str) -> bool:
    return not ok or content.startswith("Error")


def _overlap(a: frozenset[tuple[str, str]], b: frozenset[tuple[str, str]]) -> float:
    return len(a & b) / len(a | b) if a | b else 1.0


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
