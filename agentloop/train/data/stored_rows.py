"""Streams rows from the traces of a store. Known rows come from a segment; only new traces are decoded and cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from agentloop.otel.stored_trace import read_each
from agentloop.store.store import Store
from agentloop.store.tables import TraceSummary
from agentloop.train.data.chains import Cut, rows_of
from agentloop.train.data.exclusions import Exclusion
from agentloop.train.data.segments import Pair, RowSegment
from agentloop.types import Judged, Task, Trace, verdict_key

PAGE = 200
"""Number of traces whose verdicts are read, and that are appended to the segment, at once."""


def stored_rows(
    store: Store,
    segment: RowSegment,
    filter: str = "",
    *,
    project: str | None = None,
    task_of: Callable[[TraceSummary], Task | None] = lambda row: None,
    is_held_out: Callable[[Trace], bool] | None = None,
) -> Iterator[Cut]:
    """The cut of each trace that matches `filter`, newest first, under its current verdict.

    A trace whose verdict has changed is cut again. One page of rows is in memory. task_of: the task of a trace, so that
    those of other splits are excluded. is_held_out: for traces without a split, which name no task of ours, asked
    each time, because suites change; so these are decoded each time. Raises ConfigError for an invalid filter.
    """
    rows = store.every(filter, project=project)
    while page := list(islice(rows, PAGE)):
        hidden = _held_out(store, page, is_held_out)
        if hidden:
            yield Cut([], Counter({Exclusion.held_out: len(hidden)}), Counter())
            page = [row for row in page if row.key not in hidden]
        verdicts = store.verdicts(page)
        pairs: dict[int, Pair] = {key: (verdict.trace_id, verdict_key(verdict)) for key, verdict in verdicts.items()}
        cuts = {key: cut for key, pair in pairs.items() if (cut := segment.get(pair)) is not None}
        missing = [row for row in page if row.key in pairs and row.key not in cuts]
        new = _cut(store, missing, segment, task_of)
        if new:
            segment.put(dict(new.values()))
        for row in page:
            if row.key in cuts:
                yield cuts[row.key]
            elif row.key in new:
                yield new[row.key][1]


def _held_out(
    store: Store, page: Sequence[TraceSummary], is_held_out: Callable[[Trace], bool] | None
) -> set[int | None]:
    """Keys of the traces of `page` that have no split and ask for a task that is held out."""
    if is_held_out is None:
        return set()
    unnamed = [row for row in page if row.split is None]
    return {stored.row.key for stored in read_each(store, unnamed) if is_held_out(stored.trace)}


def _cut(
    store: Store, rows: Sequence[TraceSummary], segment: RowSegment, task_of: Callable[[TraceSummary], Task | None]
) -> dict[int, tuple[Pair, Cut]]:
    """Key of a trace -> its rows, without deleted traces."""
    cuts = {}
    for stored in read_each(store, rows):
        row = stored.row
        group = f"{row.group}/v{row.policy_version}" if row.group else None
        judged = Judged(stored.trace, stored.verdict, task_of(row), group, row.pool or "")
        cuts[row.key or 0] = judged.pair, rows_of(judged, segment.admission)
    return cuts
