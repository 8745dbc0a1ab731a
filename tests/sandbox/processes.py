"""What runs on this machine, seen from outside the boxes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

DEADLINE_S = 2.0
"""How long what belonged to a dead owner may live on."""


def with_word(word: str) -> list[int]:
    """Processes that have `word` among their arguments."""
    return [pid for pid, words in _command_lines() if word.encode() in words]


def mentioning(text: str) -> list[int]:
    """Processes that have `text` anywhere on their command line, as forks of a shell have."""
    return [pid for pid, words in _command_lines() if any(text.encode() in word for word in words)]


def _command_lines() -> Iterator[tuple[int, list[bytes]]]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield int(folder.name), (folder / "cmdline").read_bytes().split(b"\0")


def children(pid: int) -> list[int]:
    """Every process below `pid`."""
    try:
        direct = [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return direct + [below for child in direct for below in children(child)]


def comes_true(truth: Callable[[], bool], within_s: float = DEADLINE_S) -> bool:
    """Whether `truth` holds before the time is up."""
    end = time.monotonic() + within_s
    while not truth():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
