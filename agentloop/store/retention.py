"""What is let go of, by age and by size. A loop's own stages stay: the loop goes on from them."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, func, select
from sqlmodel import col

from agentloop.store.database import Database
from agentloop.store.tables import BodyRow, SpanRow, TraceRow
from agentloop.store.traces import remove_traces

STEP = 200
"""Traces removed in one transaction: writers wait no longer than that takes."""


def forget(
    database: Database, *, before: datetime | None = None, max_bytes: int | None = None, project: str | None = None
) -> int:
    """Remove the traces that nothing was added to since `before`, then the oldest until the store has `max_bytes`.

    project: of this one alone; the size is always that of the whole store. Returns how many traces were removed.
    """
    n = 0
    while before is not None and (removed := _remove_oldest(database, project, before)):
        n += removed
    while max_bytes is not None and size(database) > max_bytes and (removed := _remove_oldest(database, project, None)):
        n += removed
    if n and database.is_sqlite:
        _shrink(database)
    return n


def size(database: Database) -> int:
    """Bytes that are in use: pages of the file that are not free; in PostgreSQL, what the bodies and heads have."""
    with database.read() as connection:
        if database.is_sqlite:
            pages, free, page = (
                connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
                for name in ("page_count", "freelist_count", "page_size")
            )
            return int((pages - free) * page)
        return sum(
            connection.execute(select(func.coalesce(func.sum(func.octet_length(column)), 0))).scalar_one()
            for column in (col(BodyRow.data), col(SpanRow.head), col(TraceRow.body))
        )


def _remove_oldest(database: Database, project: str | None, before: datetime | None) -> int:
    query = select(col(TraceRow.key)).where(col(TraceRow.stage).is_(None))
    if project is not None:
        query = query.where(col(TraceRow.project) == project)
    if before is not None:
        query = query.where(col(TraceRow.stored_at) < before)
    with database.write(removes=True) as connection:
        keys = list(connection.execute(query.order_by(col(TraceRow.stored_at)).limit(STEP)).scalars())
        remove_traces(connection, [key for key in keys if key is not None])
        if keys:
            _merge(connection)
    return len(keys)


def _merge(connection: Connection) -> None:
    """FTS5 notes what was deleted, and gives the room back only when it merges."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("INSERT INTO body_text(body_text, rank) VALUES ('merge', -500)")


def _shrink(database: Database) -> None:
    """Give free pages back to the file system."""
    with database.engine.connect() as connection:
        raw = connection.connection.dbapi_connection
        if raw is not None:
            raw.cursor().executescript("PRAGMA incremental_vacuum")  # `execute` would free a single page
            raw.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
