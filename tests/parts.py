"""Parts of a machine that tests need: where one is missing they are skipped, and in CI they fail."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]
"""Runs `agentloop` with these words: `run("traces", "ls")`."""


def lacking(message: str) -> NoReturn:
    """message: what is missing, and the remedy."""
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message, allow_module_level=True)


@cache
def why_no_ports() -> str | None:
    """Why no program of this machine can reach another by a port of 127.0.0.1; None where it can."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            socket.create_connection(listening.getsockname(), timeout=5).close()
    except OSError as error:
        return str(error)
    return None


def need_ports() -> None:
    """Skip the test where there are none; in CI that is a failure."""
    if reason := why_no_ports():
        lacking(f"no port of 127.0.0.1 can be reached here ({reason}); run with the loopback interface up")


def children(pid: int) -> list[int]:
    """Every process below `pid`."""
    try:
        direct = [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return direct + [below for child in direct for below in children(child)]


def made_once(name: str, make: Callable[[Path], None], factory: pytest.TempPathFactory) -> Path:
    """A folder for the tests of all workers, which the first one that needs it makes."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, unfinished = root / name, root / f"{name}.{os.getpid()}"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
    return folder


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own at `folder`, of such a size: `2m`."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        lacking(f"no file system can be mounted here ({done.stderr.strip()}); run as root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
