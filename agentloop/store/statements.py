"""SQL statements written by hand, because building them costs more than running them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

CHUNK = 500
"""Maximum number of values in one IN (...)."""


MAX_VALUES = 8192
"""Maximum number of values in one INSERT; SQLite's limit is 32,766, PostgreSQL's 65,535."""
NOW = {"sqlite": "strftime('%Y-%m-%d %H:%M:%f000', 'now')", "postgresql": "now()"}
"""The time by the database's clock."""


def run(connection: Connection, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """Runs one statement with `marks` for its values. Returns its rows.

    It bypasses SQLAlchemy, and on a server the search of psycopg for marks in each statement. Both cost more than the
    statement itself if it has many rows. Raises DBAPIError, as SQLAlchemy does.
    """
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name == "sqlite":
        try:
            rows: list[tuple[Any, ...]] = driver.execute(statement, tuple(values)).fetchall()
        except sqlite3.Error as error:
            raise DBAPIError(None, None, error) from error
        return rows
    psycopg: Any = connection.dialect.loaded_dbapi
    try:
        cursor = psycopg.RawCursor(driver)
        cursor.execute(statement, values)
        # In a pipeline, fetching would wait for the server and undo what the pipeline saves.
        in_pipeline = driver.pgconn.pipeline_status
        return [] if in_pipeline or cursor.description is None else cursor.fetchall()
    except psycopg.Error as error:
        if driver.closed:  # else SQLAlchemy would try a rollback, fail, and log that traceback
            connection.invalidate(error)
        raise DBAPIError(None, None, error) from error


@contextmanager
def pipeline(connection: Connection) -> Iterator[None]:
    """On a server, statements that are `run` in this block share a round trip. Their results are dropped."""
    if connection.dialect.name == "sqlite":
        yield
        return
    psycopg: Any = connection.dialect.loaded_dbapi
    try:
        driver: Any = connection.connection.driver_connection
        with driver.pipeline():
            yield
    except psycopg.Error as error:
        raise DBAPIError(None, None, error) from error


def marks(connection: Connection, n: int, first: int = 1) -> str:
    """Placeholders for `n` values of a statement, numbered from `first`."""
    return _marks(connection.dialect.name, n, first)


@lru_cache(1024)
def _marks(dialect: str, n: int, first: int) -> str:
    return ", ".join(["?"] * n if dialect == "sqlite" else [f"${number}" for number in range(first, first + n)])


def insert_rows(
    connection: Connection,
    table: str,
    names: Sequence[str],
    rows: Sequence[tuple[Any, ...]],
    *,
    ignore: bool = False,
    made_at: bool = False,
) -> None:
    """Inserts many rows at a fifth of the ORM's cost.

    table, names: constants of this package, never a user's text. ignore: leave existing rows unchanged. made_at: the
    column of that name gets the time by the database's clock.
    """
    end = " ON CONFLICT DO NOTHING" if ignore else ""
    if connection.dialect.name == "sqlite" and rows:
        driver: Any = connection.connection.driver_connection
        try:
            # One prepared statement with one row: SQLite has no round trips that a statement of many rows could save.
            driver.executemany(_insert("sqlite", table, tuple(names), 1, made_at) + end, rows)
        except sqlite3.Error as error:
            raise DBAPIError(None, None, error) from error
        return
    for part in _parts(rows, len(names)):
        statement = _insert(connection.dialect.name, table, tuple(names), len(part), made_at) + end
        run(connection, statement, [value for row in part for value in row])


def insert_new(
    connection: Connection,
    table: str,
    names: Sequence[str],
    rows: Sequence[tuple[Any, ...]],
    returned: Sequence[str],
) -> Iterator[Any]:
    """Inserts the rows that do not exist yet. Returns their columns `returned`, in no order.

    table, names, returned: constants of this package. Texts and times are converted for the database.
    """
    end = f" ON CONFLICT DO NOTHING RETURNING {', '.join(returned)}"
    for part in _parts(rows, len(names)):
        values = [_storable(connection, value) for row in part for value in row]
        yield from run(connection, _insert(connection.dialect.name, table, tuple(names), len(part)) + end, values)


@lru_cache(256)
def _insert(dialect: str, table: str, names: tuple[str, ...], n: int, made_at: bool = False) -> str:
    listed = ", ".join(f'"{name}"' for name in (*names, *(["made_at"] if made_at else [])))
    width = len(names)
    end = f", {NOW[dialect]}" if made_at else ""
    rows = ", ".join(f"({_marks(dialect, width, 1 + number * width)}{end})" for number in range(n))
    return f"INSERT INTO {table} ({listed}) VALUES {rows}"  # noqa: S608


def _parts(rows: Sequence[tuple[Any, ...]], n_values: int) -> Iterator[Sequence[tuple[Any, ...]]]:
    """`rows`, with `n_values` each, in parts that fit into one statement."""
    step = max(1, MAX_VALUES // n_values)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def _storable(connection: Connection, value: Any) -> Any:
    if isinstance(value, str):
        # PostgreSQL refuses NUL in a text.
        return value if connection.dialect.name == "sqlite" else value.replace("\0", "\ufffd")
    return stored_time(connection, value) if isinstance(value, datetime) else value


def stored_time(connection: Connection, at: datetime) -> datetime | str:
    """A time for a hand-written statement: SQLite has no type for times."""
    return f"{at:%Y-%m-%d %H:%M:%S.%f}" if connection.dialect.name == "sqlite" else at


def chunks(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """`values` in parts that fit into one statement."""
    for start in range(0, len(values), CHUNK):
        yield values[start : start + CHUNK]
