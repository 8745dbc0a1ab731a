"""The connection to SQLite or PostgreSQL: transactions, durability, and the databases' own words made useful.

A write returns after it is committed to disk, so what was acknowledged survives `kill -9` and a power cut.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError
from sqlmodel import Session

from agentloop.errors import ConfigError, StoreError, extra

MIGRATION_LOCK, BODY_LOCK = 0x616C0002, 0x616C0003
"""Numbers of PostgreSQL's advisory locks, which end with their transactions."""
CHUNK = 500
"""Values in one IN (...)."""
MAX_VALUES = 8192
"""Values in one INSERT; SQLite takes 32,766, PostgreSQL 65,535."""
FOLDER = "traces"
"""The name of the folder of a project's store."""
WRITES, REMOVES = "writes", "removes"
"""Kinds of transactions that change something."""
PING_AFTER_S = 5.0
"""Seconds that a connection to a server may be idle before it is tried."""
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
_log = logging.getLogger(__name__)


class Timeouts(NamedTuple):
    """Seconds that a server may take."""

    connect_s: float = 10.0
    statement_s: float = 60.0
    lock_s: float = 30.0
    """Of waiting for another transaction. A file, too, is waited for so long."""
    idle_s: float = 60.0
    """Of a transaction in which nothing happens, after which the server ends it."""


DEFAULT_TIMEOUTS = Timeouts()


class Database:
    """Where the tables are. `name` is the file, or the URL without its password."""

    def __init__(self, where: Path | str, timeouts: Timeouts = DEFAULT_TIMEOUTS) -> None:
        """Raises ConfigError for a URL that is none, or whose driver is missing."""
        if isinstance(where, str) and "://" in where:
            self.path, self.engine = _by_url(where, timeouts)
        else:
            self.path, self.engine = Path(where), _sqlite(Path(where), timeouts)
        self.is_sqlite = self.engine.dialect.name == "sqlite"
        self.name = str(self.path) if self.path else _without_password(self.engine.url)
        self._writing = self.engine.execution_options(agentloop_write=WRITES)

    def keep_private(self) -> None:
        """Make the file and its folder where there are none; only this user may open them. Raises OSError.

        A file that was open to others is closed to them, and a warning says so. So is an existing folder if it is a
        project's `traces`; any other may hold what is not ours.
        """
        if self.path is None:
            return
        folder = self.path.parent
        if not folder.exists():
            folder.mkdir(PRIVATE_FOLDER, parents=True)
        elif folder.name == FOLDER:
            _restrict(folder, PRIVATE_FOLDER)
        if not self.path.exists():
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, PRIVATE_FILE))
        mode = _restrict(self.path, PRIVATE_FILE)
        for suffix in ("-wal", "-shm"):  # SQLite gives new ones the mode of the file
            _restrict(self.path.with_name(self.path.name + suffix), PRIVATE_FILE)
        if mode is not None:
            _log.warning("%s was open to other users (mode %04o); now only its owner may open it", self.path, mode)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that sees one state of the store."""
        with self.explained(), self.engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self, *, removes: bool = False, within: Connection | None = None) -> Iterator[Connection]:
        """A transaction that is on disk when the block has ended. In SQLite one at a time; others wait for it.

        removes: True where traces go, so that nobody comes to rely on a body that goes with them. On a server such
        a transaction has no other writer beside it; that lock is taken first, or two could wait for each other.
        within: a transaction that is under way, and ends later; the block becomes a part of it.
        """
        if within is not None:
            with self.explained():
                yield within
            return
        engine = self.engine.execution_options(agentloop_write=REMOVES) if removes else self._writing
        with self.explained(), engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def session(self, *, write: bool = False, within: Connection | None = None) -> Iterator[Session]:
        """The same with rows as objects, which may be used after the block."""
        bind = within or (self._writing if write else self.engine)
        with self.explained(), Session(bind, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def lock_file(self) -> Iterator[None]:
        """Hold a file for one loop; the lock dies with the process. Raises StoreError when it is taken."""
        assert self.path is not None  # noqa: S101
        with ExitStack() as held:
            with self.explained():
                self._lock_file(held, self.path.with_suffix(".lock"))
            yield

    def _lock_file(self, held: ExitStack, path: Path) -> None:
        path.touch(PRIVATE_FILE)
        _restrict(path, PRIVATE_FILE)
        handle = held.enter_context(path.open("a+"))
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            raise StoreError(
                f"{self.name} is in use by process {handle.read().strip()}; wait for it or end it"
            ) from None
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """The database's and the file system's words, with the place and the next move."""
        try:
            yield
        except DBAPIError as error:
            problem = str(error.orig).strip().partition("\n")[0]
            raise StoreError(f"{self.name}: {problem}; {_remedy(problem, self.path is None)}") from error
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(
                f"{error.filename or self.name}: {error.strerror}; {_remedy(str(error), False)}"
            ) from error


def _restrict(path: Path, most: int) -> int | None:
    """Take the permissions beyond `most` from what is at `path`; the mode before, None where nothing changed."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if not mode & ~most:
            return None
        path.chmod(mode & most)
    except (FileNotFoundError, PermissionError):  # nothing is there, or its owner is another user, who decides
        return None
    return mode


def run(connection: Connection, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """One statement that is written out, with `marks` for its values; the rows that it returns.

    On a server it goes past SQLAlchemy, and past psycopg's reading of each statement for its marks, which costs more
    than the statement where that has many rows.
    """
    if connection.dialect.name == "sqlite":
        result = connection.exec_driver_sql(statement, tuple(values))
        return [tuple(row) for row in result] if result.returns_rows else []
    driver: Any = connection.connection.driver_connection
    psycopg: Any = connection.dialect.loaded_dbapi
    try:
        cursor = psycopg.RawCursor(driver)
        cursor.execute(statement, values)
        in_pipeline = driver.pgconn.pipeline_status
        return [] if in_pipeline or cursor.description is None else cursor.fetchall()
    except psycopg.Error as error:
        raise DBAPIError(None, None, error) from error


@contextmanager
def pipeline(connection: Connection) -> Iterator[None]:
    """On a server, the statements that are `run` in this block share a round trip; what they return is dropped."""
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
    """Where the values of a statement go, `n` of them from the `first` on."""
    return _marks(connection.dialect.name, n, first)


@lru_cache(1024)
def _marks(dialect: str, n: int, first: int) -> str:
    return ", ".join(["?"] * n if dialect == "sqlite" else [f"${number}" for number in range(first, first + n)])


def insert_rows(
    connection: Connection, table: str, names: Sequence[str], rows: Sequence[tuple[Any, ...]], *, ignore: bool = False
) -> None:
    """Many rows at once, by statements that are written out, which costs a fifth of the ORM.

    table, names: constants of this package, never a user's words. ignore: leave rows that are there as they are.
    """
    end = " ON CONFLICT DO NOTHING" if ignore else ""
    if connection.dialect.name == "sqlite" and rows:
        connection.exec_driver_sql(_insert("sqlite", table, tuple(names), 1) + end, list(rows))
        return
    for part in _parts(rows, len(names)):
        statement = _insert(connection.dialect.name, table, tuple(names), len(part)) + end
        run(connection, statement, [value for row in part for value in row])


def insert_new(
    connection: Connection,
    table: str,
    names: Sequence[str],
    rows: Sequence[tuple[Any, ...]],
    returned: Sequence[str],
) -> Iterator[Any]:
    """Insert the rows that are not there yet; the columns `returned` of those, in no order.

    table, names, returned: constants of this package. Texts and times are made fit for the database.
    """
    end = f" ON CONFLICT DO NOTHING RETURNING {', '.join(returned)}"
    for part in _parts(rows, len(names)):
        values = [_storable(connection, value) for row in part for value in row]
        yield from run(connection, _insert(connection.dialect.name, table, tuple(names), len(part)) + end, values)


@lru_cache(256)
def _insert(dialect: str, table: str, names: tuple[str, ...], n: int) -> str:
    listed, width = ", ".join(f'"{name}"' for name in names), len(names)
    rows = ", ".join(f"({_marks(dialect, width, 1 + number * width)})" for number in range(n))
    return f"INSERT INTO {table} ({listed}) VALUES {rows}"  # noqa: S608


def _parts(rows: Sequence[tuple[Any, ...]], n_values: int) -> Iterator[Sequence[tuple[Any, ...]]]:
    """`rows`, of `n_values` each, in parts that fit into one statement."""
    step = max(1, MAX_VALUES // n_values)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def _storable(connection: Connection, value: Any) -> Any:
    if isinstance(value, str):
        return value if connection.dialect.name == "sqlite" else value.replace("\0", "\ufffd")
    return stored_time(connection, value) if isinstance(value, datetime) else value


def stored_time(connection: Connection, at: datetime) -> datetime | str:
    """A time as a statement that is written out takes it: SQLite has no times of its own."""
    return f"{at:%Y-%m-%d %H:%M:%S.%f}" if connection.dialect.name == "sqlite" else at


def chunks(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """`values` in parts that fit into one statement."""
    for start in range(0, len(values), CHUNK):
        yield values[start : start + CHUNK]


def _sqlite(path: Path, timeouts: Timeouts) -> Engine:
    # Made from its parts, because in a URL that is written out a `?` in the path would begin the options.
    engine = create_engine(URL.create("sqlite", database=str(path)), connect_args={"timeout": timeouts.lock_s})

    @event.listens_for(engine, "connect")
    def _pragmas(connection: Any, _: object) -> None:
        connection.isolation_level = None  # the driver would begin and commit on its own account
        if not connection.execute("PRAGMA page_count").fetchone()[0]:  # it is a write: who reads would wait for others
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        for pragma in (
            f"busy_timeout = {round(1000 * timeouts.lock_s)}",
            "journal_mode = WAL",
            "synchronous = FULL",
            "wal_autocheckpoint = 4000",
            "journal_size_limit = 67108864",
            "cache_size = -16384",
            "temp_store = MEMORY",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # A writer says so at once: one that has read first could not wait for another writer any more.
        write = connection.get_execution_options().get("agentloop_write")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def _without_password(url: URL) -> str:
    query = {name: value for name, value in url.query.items() if "pass" not in name}
    return url.set(drivername="postgresql", query=query).render_as_string(hide_password=True)


def _postgresql(url: URL, timeouts: Timeouts) -> Engine:
    # A pooler between us and the server may give each transaction another session: nothing is prepared or set in one.
    connect = {
        "prepare_threshold": None,
        "connect_timeout": max(2, round(timeouts.connect_s)),  # libpq takes no less
        "tcp_user_timeout": round(1000 * (timeouts.statement_s + timeouts.connect_s)),  # of a cut connection
    }
    engine = create_engine(url, connect_args={name: value for name, value in connect.items() if name not in url.query})
    limits = ", ".join(
        f"set_config('{name}', '{round(1000 * seconds)}', true)"
        for name, seconds in (
            ("statement_timeout", timeouts.statement_s),
            ("lock_timeout", timeouts.lock_s),
            ("idle_in_transaction_session_timeout", timeouts.idle_s),
        )
    )
    locks = {
        None: "",
        WRITES: f", pg_advisory_xact_lock_shared({BODY_LOCK})",
        REMOVES: f", pg_advisory_xact_lock({BODY_LOCK})",
    }

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        kind = connection.get_execution_options().get("agentloop_write")
        run(connection, f"SELECT {limits}{locks[kind]}")

    @event.listens_for(engine, "checkin")
    def _note(_: Any, record: Any) -> None:
        record.info["used_at"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def _ping(connection: Any, record: Any, _: Any) -> None:
        # A connection that was idle may have been cut; asking each time would cost as much as a statement.
        if time.monotonic() - record.info.get("used_at", math.inf) > PING_AFTER_S:
            try:
                engine.dialect.do_ping(connection)
            except engine.dialect.loaded_dbapi.Error as error:
                raise DisconnectionError(str(error)) from error

    return engine


def _by_url(where: str, timeouts: Timeouts) -> tuple[Path | None, Engine]:
    try:
        url = make_url(where)
    except (ArgumentError, ValueError):  # whose words may have the password
        raise ConfigError("store: this is no URL; write a path, or postgresql://USER:PASSWORD@HOST/NAME") from None
    if url.get_backend_name() == "sqlite" and url.database:
        return Path(url.database), _sqlite(Path(url.database), timeouts)
    if url.get_backend_name() not in {"postgresql", "postgres"}:
        raise ConfigError(
            f"store: cannot use {url.drivername!r}; write a path, or postgresql://USER:PASSWORD@HOST/NAME"
        )
    try:
        return None, _postgresql(url.set(drivername="postgresql+psycopg"), timeouts)
    except ModuleNotFoundError as error:
        raise ConfigError(f"store: PostgreSQL needs psycopg; {extra('scale')}") from error


def _remedy(problem: str, is_server: bool) -> str:
    lowered = problem.lower()
    if "full" in lowered or "no space" in lowered:
        return "free some space there, then run the same command again: it continues"
    if any(words in lowered for words in ("no such table", "no such column", "has no column")) or (
        is_server and ("relation" in lowered or "column" in lowered) and "does not exist" in lowered
    ):
        return "the store is half migrated or was changed by hand; bring back a copy from before that"
    if is_server:
        return _server_remedy(lowered)
    if "read" in lowered or "permission" in lowered or "unable to open" in lowered:
        return "choose a folder that can be written"
    if "not a database" in lowered or "malformed" in lowered:
        return "this is no trace store; choose another folder"
    return "then run the same command again"


def _server_remedy(problem: str) -> str:
    if "read-only" in problem or "permission denied" in problem:
        return "name the primary server, and a user who may write there"
    if "timeout" in problem and "cancel" in problem:
        return "run the same command again when the server has less to do, or raise the timeouts in [store]"
    if any(words in problem for words in ("connect", "password", "does not exist", "resolve", "timeout expired")):
        return "check that the server runs and that the URL names its host, user, password and database"
    return "then run the same command again"
