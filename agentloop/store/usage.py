"""The tokens and costs of the answers in stored traces, without reading messages.

The light columns have sums only. A cost needs the model, the cached tokens and the price of each answer, so this reads
the document of a trace. It loads no bodies and builds no domain types, which take most of the time of a whole read.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, func, select
from sqlmodel import col

from agentloop.store.database import Database
from agentloop.store.find import rows_where
from agentloop.store.steps import read_head
from agentloop.store.tables import TraceRow
from agentloop.store.verdict_history import last_rows, verdicts_of
from agentloop.types import Score

PAGE = 500
"""Traces read by one query."""
_NAMES = ("key", "project", "id", "stage", "policy_version", "task_id", "episode_id", "reward", "duration_s", "body")
_COLUMNS = [col(getattr(TraceRow, name)) for name in (*_NAMES, "bodies")]


class TraceUsage(NamedTuple):
    """A trace with everything that its cost depends on."""

    row: Any
    """Its columns `key`, `project`, `id`, `stage`, `reward`, `duration_s`, ..."""
    document: dict[str, Any] | None
    """The trace as plain JSON, with references in the place of messages; None for a trace that consists of spans."""
    scores: tuple[Score, ...]
    """Its scores for which a judge model was called."""


class StageTime(NamedTuple):
    """The traces of a stage."""

    n: int
    duration_s: float
    """Sum of their durations."""


class Usages:
    """The part of the store that reads the usage of traces."""

    _database: Database

    def stage_times(self, project: str) -> dict[str, StageTime]:
        """Number and summed duration of the traces of each stage."""
        stage = col(TraceRow.stage)
        query = select(stage, func.count(), func.sum(col(TraceRow.duration_s)))
        query = query.where(col(TraceRow.project) == project, stage.is_not(None)).group_by(stage)
        with self._database.read() as connection:
            return {name or "": StageTime(n, float(duration_s)) for name, n, duration_s in connection.execute(query)}

    def usage(self, filter: str = "", *, project: str | None = None) -> Iterator[list[TraceUsage]]:
        """Matching traces, newest first, a page at a time. Raises ConfigError."""
        last: int | None = None
        while True:
            query = rows_where(self._database, select(*_COLUMNS), project, filter)
            if last is not None:
                query = query.where(col(TraceRow.key) < last)
            with self._database.read() as connection:
                rows: Any = connection.execute(query.order_by(col(TraceRow.key).desc()).limit(PAGE)).all()
                page = _page(connection, rows)
            if page:
                yield page
            if len(rows) < PAGE:
                return
            last = rows[-1].key


def _page(connection: Connection, rows: Sequence[Any]) -> list[TraceUsage]:
    verdicts = {
        key: orjson.loads(zlib.decompress(row.body)) for key, row in last_rows(connection, [r.key for r in rows])
    }
    # Scores of rules cost nothing, so the current verdict is read only where a judge model was called or may have been.
    judged_keys = {key for key, verdict in verdicts.items() if any(map(_was_judged, verdict["scores"]))}
    imported_keys = {row.key for row in rows if row.bodies is not None}
    current = verdicts_of(connection, judged_keys | imported_keys)
    return [_usage(row, current[row.key].scores if row.key in current else ()) for row in rows]


def _was_judged(score: dict[str, Any]) -> bool:
    return bool(score.get("n_prompt_tokens", 0) + score.get("n_completion_tokens", 0))


def _usage(row: Any, scores: tuple[Score, ...]) -> TraceUsage:
    document = None
    if row.body is not None:
        document = read_head(row, lambda keys: {}).document
    return TraceUsage(
        row, document, tuple(score for score in scores if score.n_prompt_tokens + score.n_completion_tokens)
    )
