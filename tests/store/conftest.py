"""A store of each kind; PostgreSQL is a real server of its own, in a temporary folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentloop.store.store import Store

BINARIES = ("/usr/lib/postgresql/17/bin", "/usr/lib/postgresql/16/bin", "/usr/lib/postgresql/15/bin")
REMEDY = "`apt install postgresql` (its programs are enough, no service is needed)"


def _binaries() -> Path | None:
    found = shutil.which("postgres", path=os.pathsep.join((*BINARIES, os.environ.get("PATH", ""))))
    return Path(found).resolve().parent if found else None


def _as_somebody(*command: object) -> list[str]:
    """PostgreSQL refuses to run as root."""
    words = [str(word) for word in command]
    return ["runuser", "-u", "postgres", "--", *words] if os.geteuid() == 0 else words


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The URL of a PostgreSQL server without a database name."""
    binaries = _binaries()
    if binaries is None:
        message = f"no PostgreSQL here. Remedy: {REMEDY}"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    folder = Path(tempfile.mkdtemp(prefix="al-pg-"))
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres")
    data = folder / "data"
    ran = {"check": True, "stdout": subprocess.DEVNULL, "cwd": "/"}
    subprocess.run(_as_somebody(binaries / "initdb", "-D", data, "-A", "trust", "-U", "postgres", "-E", "UTF8"), **ran)
    options = f"-k {folder} -c listen_addresses='' -c max_connections=50"
    start = _as_somebody(binaries / "pg_ctl", "-D", data, "-l", folder / "log", "-o", options, "-w", "start")
    subprocess.run(start, **ran)
    try:
        yield f"postgresql://postgres@/NAME?host={folder}"
    finally:
        subprocess.run(_as_somebody(binaries / "pg_ctl", "-D", data, "-m", "immediate", "stop"), **ran)
        shutil.rmtree(folder)


@pytest.fixture
def postgresql(server: str) -> Iterator[str]:
    """The URL of an empty database."""
    import psycopg

    name = f"t{uuid.uuid4().hex}"
    with psycopg.connect(server.replace("NAME", "postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        yield server.replace("NAME", name)
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    """Where a new store may be made."""
    if request.param == "sqlite":
        return tmp_path / "traces" / "store.db"
    url: str = request.getfixturevalue("postgresql")
    return url


@pytest.fixture
def either(where: str | Path) -> Iterator[Store]:
    """A new store of each kind."""
    made = Store(where)
    yield made
    made.close()
