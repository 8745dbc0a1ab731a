"""What `agentloop failures` shows: the document of `--json` and of `GET /api/v1/failures`, filled in by `survey.py`."""

from __future__ import annotations

from typing import Literal, get_args

from agentloop.types import Frozen

By = Literal["type", "group", "version", "tool", "task", "source", "model", "agent"]
BY: tuple[str, ...] = get_args(By)
Trend = Literal["", "new", "gone", "growing", "shrinking"]
NONE = "(none)"


class Rate(Frozen):
    """n of `of` traces, with Wilson's 95% interval."""

    n: int
    of: int
    low: float
    high: float


class Example(Frozen):
    """The trace that stands for others, and its words."""

    trace_id: str
    task: str | None
    step: int | None
    tool: str | None
    """Whose call failed."""
    evidence: str


class Change(Frozen):
    """How often before the version asked for, and since."""

    before: Rate
    since: Rate
    trend: Trend
    """Empty where the intervals overlap."""


class ParetoBar(Frozen):
    """One bar of the Pareto."""

    value: str
    n: int
    share: float
    """Of all that are counted."""
    cumulative: float
    """With those above it."""
    n_tasks: int
    rate: Rate | None
    """Of the traces that have the value; None for types, of which only what failed has any."""
    mostly: str
    """The commonest type."""
    change: Change | None
    example: Example
    next: str
    """What to do."""


class Cluster(Frozen):
    """Failures that are alike."""

    id: str
    type: str
    detector: str
    tool: str | None
    template: str
    n: int
    share: float
    n_tasks: int
    versions: dict[str, Rate]
    """`v4` -> how often, of those that have any version."""
    change: Change | None
    is_new: bool
    """Never seen before the version asked for, be it by chance."""
    example: Example
    traces: tuple[str, ...]
    """The first of them."""


class Survey(Frozen):
    """What `agentloop failures` shows."""

    by: str
    n: int
    """Traces that the filter is about."""
    failed: int
    won: int
    untyped: int
    """Failed, and nobody has said why."""
    unknown: int
    """Nobody has said how they ended."""
    unknown_labelled: int
    unjudged: int
    """Never seen by the judge."""
    counted: int
    """Failures in the rows."""
    earlier: str
    """The versions that `before` is about, `v1-v3`; empty where there are no two."""
    later: str
    purposes: tuple[str, ...]
    """For what episodes were rolled out; rates of versions mean something within one."""
    n_rows: int
    rows: tuple[ParetoBar, ...]
    n_clusters: int
    clusters: tuple[Cluster, ...]
