"""What runs on this machine, seen from outside the sandboxes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Inmates:
    """The processes of one sandbox that lives, as the kernel lists them: whatever they call themselves.

    Of one that is gone, another sandbox may have the namespace's number.
    """

    namespace: str
    groups: dict[str, Path]
    """Controller -> folder of the sandbox's own control group; empty where it has none."""

    @classmethod
    def beside(cls, pid: int) -> Inmates:
        """Of the sandbox that process `pid` is in."""
        groups, ours = _groups(str(pid)), _groups("self")
        own = {name: folder for name, folder in groups.items() if folder != ours.get(name) and folder.is_dir()}
        return cls(os.readlink(f"/proc/{pid}/ns/pid"), own)

    def now(self) -> set[int]:
        """By the files `cgroup.procs`, and by the namespace of process numbers."""
        found = set()
        for folder in self.groups.values():
            with suppress(OSError):
                found |= set(map(int, (folder / "cgroup.procs").read_text().split()))
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(process / "ns/pid") == self.namespace:
                    found.add(int(process.name))
        return found


def _groups(pid: str) -> dict[str, Path]:
    """Controller -> folder, of the trees that are mounted where they usually are."""
    found = {}
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(",") if names else ("memory", "pids"):
            mount = Path("/sys/fs/cgroup", name) if names else Path("/sys/fs/cgroup")
            if (mount / "cgroup.procs").exists():
                found.setdefault(name, mount / path.lstrip("/"))
    return {name: found[name] for name in ("memory", "pids") if name in found}
