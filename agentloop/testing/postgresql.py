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
    folder = Path(tempfile.mkdtemp(prefix="al-pg-"))
    data = folder / "data"
    # An immediate stop writes no checkpoint, which data that is deleted right after does not need.
    with _at_the_end(folder, programs / "pg_ctl", "-D", data, "-m", "immediate", "stop"):
        if os.geteuid() == 0:
            shutil.chown(folder, "postgres")
        _run(programs / "initdb", "-D", data, "-A", "trust", "-U", "postgres", "-E", "UTF8")
        options = " -c ".join((f"-k {folder}", "listen_addresses=''", "max_connections=50", *settings))
        _run(programs / "pg_ctl", "-D", data, "-l", folder / "log", "-o", options, "-w", "start")
        yield f"postgresql://postgres@/NAME?host={folder}"


@contextmanager
def _at_the_end(folder: Path, *command: object) -> Iterator[None]:
    """After the block, and also if this process is killed inside it: run `command`, and remove `folder`.

    A separate process does it: its input ends when this process does.
    """
    words = ["sh", "-c", 'cat; folder=$1; shift; "$@"; rm -rf "$folder"', "sh", str(folder), *_as_postgres(*command)]
    quiet = subprocess.DEVNULL
    # A separate session keeps Ctrl-C from ending it before it has cleaned up. It starts in /, because the user postgres
    # may not enter the current folder.
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, cwd="/", start_new_session=True):
        yield


@contextmanager
def database(of: str, template: str = "template0") -> Iterator[str]:
    """The URL of a new database on the server `of`, a copy of `template` (default: empty). It is dropped afterwards."""
    import psycopg

    name = f"t{uuid.uuid4().hex}"
    with psycopg.connect(of.replace("NAME", "postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        yield of.replace("NAME", name)
        # FORCE ends the connections that a failed test has left open.
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _as_postgres(*command: object) -> list[str]:
    """The command for a user whom PostgreSQL accepts: it refuses root."""
    words = [str(word) for word in command]
    return ["runuser", "-u", "postgres", "--", *words] if os.geteuid() == 0 else words


def _run(*command: object) -> None:
    subprocess.run(_as_postgres(*command), check=True, stdout=subprocess.DEVNULL, cwd="/")
