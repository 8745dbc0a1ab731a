"""A private PostgreSQL server in a temporary folder, without a port, for the duration of a block."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REMEDY = "`apt install postgresql` (its programs are enough, no service is needed)"


def binaries() -> Path | None:
    """The folder with the programs of the newest installed server; None if there is none."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    server = shutil.which("postgres", path=os.pathsep.join((*map(str, debian), os.environ.get("PATH", ""))))
    return Path(server).resolve().parent if server else None


@contextmanager
def server(*settings: str) -> Iterator[str]:
    """The server's URL, with NAME as a placeholder for the database.

    settings: the server's, such as `fsync=off`. Raises FileNotFoundError if PostgreSQL is not installed.
    """
    programs = binaries()
    if programs is None:
        raise FileNotFoundError(f"no PostgreSQL here. Remedy: {REMEDY}")
    with tempfile.TemporaryDirectory(prefix="al-pg-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if os.geteuid() == 0:
            shutil.chown(folder, "postgres")
        data = folder / "data"
        _run(programs / "initdb", "-D", data, "-A", "trust", "-U", "postgres", "-E", "UTF8")
        options = f"-k {folder} -c listen_addresses='' -c max_connections=50" + "".join(
            f" -c {one}" for one in settings
        )
        _run(programs / "pg_ctl", "-D", data, "-l", folder / "log", "-o", options, "-w", "start")
        try:
            yield f"postgresql://postgres@/NAME?host={folder}"
        finally:
            _run(programs / "pg_ctl", "-D", data, "-m", "immediate", "stop")


@contextmanager
def database(of: str, template: str = "template0") -> Iterator[str]:
    """The URL of a new database on the server `of`, a copy of `template` (default: empty). It is dropped afterwards."""
    import psycopg

    name = f"t{uuid.uuid4().hex}"
    with psycopg.connect(of.replace("NAME", "postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        yield of.replace("NAME", name)
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _run(*command: object) -> None:
    words = [str(word) for word in command]
    as_somebody = ["runuser", "-u", "postgres", "--", *words] if os.geteuid() == 0 else words  # PostgreSQL refuses root
    subprocess.run(as_somebody, check=True, stdout=subprocess.DEVNULL, cwd="/")
