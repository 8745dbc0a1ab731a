"""Lists of traces: by filter, a page at a time; and by column, as a loop asks for its own."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import select
from sqlmodel import col

from agentloop.errors import ConfigError
from agentloop.store.database import Database
from agentloop.store.query import conditions
from agentloop.store.tables import TraceRow, TraceSummary, columns

MAX_PAGE = 1000
"""Traces on one page at most."""


class TracePage(NamedTuple):
    """Some traces, and the cursor of the next page; None when there is none."""

    traces: list[TraceSummary]
    next: str | None


def find(database: Database, project: str | None, filter: str, cursor: str | None, limit: int) -> TracePage:
    """The traces for which `filter` holds, those first that were stored last.

    A page begins after a row, not after a number of rows: what arrives meanwhile moves nothing.
    """
    if not 1 <= limit <= MAX_PAGE:
        raise ConfigError(f"limit: {limit} is not between 1 and {MAX_PAGE}")
    listed = columns(TraceRow, without=("body", "bodies"))
    query = select(*listed).where(*conditions(filter, database.engine.dialect.name))
    if project is not None:
        query = query.where(col(TraceRow.project) == project)
    if cursor is not None:
        query = query.where(col(TraceRow.key) < _key(cursor))
    with database.read() as connection:
        rows: Any = connection.execute(query.order_by(col(TraceRow.key).desc()).limit(limit + 1)).mappings().all()
    traces = [TraceSummary.model_construct(**row) for row in rows[:limit]]
    return TracePage(traces, str(traces[-1].key) if len(rows) > limit else None)


def _key(cursor: str) -> int:
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise ConfigError(f"cursor: {cursor!r} is none of this store; leave it out to begin with the newest trace")
    return int(cursor)
