"""The connection to SQLite or PostgreSQL: transactions, durability, and the databases' own words made useful.

A write returns after it is committed to disk, so what was acknowledged survives `kill -9` and a power cut.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, func, make_url, select, text
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlmodel import Session

from agentloop.errors import ConfigError, StoreError, extra

WRITER_LOCK, MIGRATION_LOCK, BODY_LOCK = 0x616C0001, 0x616C0002, 0x616C0003
"""Numbers of PostgreSQL's advisory locks."""
CHUNK = 500
"""Values in one IN (...)."""
FOLDER = "traces"
"""The name of the folder of a project's store."""
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
_log = logging.getLogger(__name__)


class Database:
    """Where the tables are. `name` is the file, or the URL without its password."""

    def __init__(self, where: Path | str) -> None:
        """Raises ConfigError for a URL that is none, or whose driver is missing."""
        if isinstance(where, str) and "://" in where:
            self.path, self.engine = _by_url(where)
        else:
            self.path, self.engine = Path(where), _sqlite(Path(where))
        self.is_sqlite = self.engine.dialect.name == "sqlite"
        self.name = str(self.path) if self.path else self.engine.url.render_as_string(hide_password=True)
        self._writing = self.engine.execution_options(agentloop_write=True)

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
    def write(self, *, removes: bool = False) -> Iterator[Connection]:
        """A transaction that is on disk when the block has ended. In SQLite one at a time; others wait for it.

        removes: True where traces go, so that nobody comes to rely on a body that goes with them. On a server such
        a transaction has no other writer beside it; that lock is taken first, or two could wait for each other.
        """
        with self.explained(), self._writing.connect() as connection, connection.begin():
            if not self.is_sqlite:
                lock = func.pg_advisory_xact_lock if removes else func.pg_advisory_xact_lock_shared
                connection.execute(select(lock(BODY_LOCK)))
            yield connection

    @contextmanager
    def session(self, *, write: bool = False) -> Iterator[Session]:
        """The same with rows as objects, which may be used after the block."""
        engine = self._writing if write else self.engine
        with self.explained(), Session(engine, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the store for one loop; the lock dies with the process. Raises StoreError when it is taken."""
        with ExitStack() as held:
            with self.explained():
                if self.path is None:
                    self._lock_server(held)
                else:
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

    def _lock_server(self, held: ExitStack) -> None:
        connection = held.enter_context(self.engine.connect().execution_options(isolation_level="AUTOCOMMIT"))
        if not connection.execute(text("SELECT pg_try_advisory_lock(:lock)"), {"lock": WRITER_LOCK}).scalar():
            raise StoreError(f"{self.name} is in use by another loop; wait for it or end it")
        held.callback(connection.execute, text("SELECT pg_advisory_unlock(:lock)"), {"lock": WRITER_LOCK})

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


def insert_rows(
    connection: Connection, table: str, names: Sequence[str], rows: Sequence[tuple[Any, ...]], *, ignore: bool = False
) -> None:
    """Many rows at once, by the driver's own executemany, which costs a fifth of the ORM.

    table, names: constants of this package, never a user's words. ignore: leave rows that are there as they are.
    """
    if not rows:
        return
    mark = "?" if connection.dialect.name == "sqlite" else "%s"
    listed = ", ".join(f'"{name}"' for name in names)
    statement = f"INSERT INTO {table} ({listed}) VALUES ({', '.join([mark] * len(names))})"  # noqa: S608
    connection.exec_driver_sql(statement + (" ON CONFLICT DO NOTHING" if ignore else ""), list(rows))


def chunks(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """`values` in parts that fit into one statement."""
    for start in range(0, len(values), CHUNK):
        yield values[start : start + CHUNK]


def _sqlite(path: Path) -> Engine:
    # Made from its parts, because in a URL that is written out a `?` in the path would begin the options.
    engine = create_engine(URL.create("sqlite", database=str(path)), connect_args={"timeout": 30})

    @event.listens_for(engine, "connect")
    def _pragmas(connection: Any, _: object) -> None:
        connection.isolation_level = None  # the driver would begin and commit on its own account
        if not connection.execute("PRAGMA page_count").fetchone()[0]:  # it is a write: who reads would wait for others
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        for pragma in (
            "busy_timeout = 30000",
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


def _by_url(where: str) -> tuple[Path | None, Engine]:
    try:
        url = make_url(where)
    except ArgumentError as error:
        raise ConfigError(f"store: {error}; write a path, or postgresql://USER:PASSWORD@HOST/NAME") from error
    if url.get_backend_name() == "sqlite" and url.database:
        return Path(url.database), _sqlite(Path(url.database))
    if url.get_backend_name() not in {"postgresql", "postgres"}:
        raise ConfigError(
            f"store: cannot use {url.drivername!r}; write a path, or postgresql://USER:PASSWORD@HOST/NAME"
        )
    try:
        return None, create_engine(url.set(drivername="postgresql+psycopg"), pool_pre_ping=True)
    except ModuleNotFoundError as error:
        raise ConfigError(f"store: PostgreSQL needs psycopg; {extra('scale')}") from error


def _remedy(problem: str, is_server: bool) -> str:
    lowered = problem.lower()
    if "full" in lowered or "no space" in lowered:
        return "free some space there, then run the same command again: it continues"
    if is_server and ("connect" in lowered or "password" in lowered or "does not exist" in lowered):
        return "check that the server runs and that the URL names its host, user, password and database"
    if "read" in lowered or "permission" in lowered or "unable to open" in lowered:
        return "choose a folder that can be written"
    if "not a database" in lowered or "malformed" in lowered:
        return "this is no trace store; choose another folder"
    return "then run the same command again"
