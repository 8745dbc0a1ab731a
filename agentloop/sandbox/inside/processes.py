"""The other processes of the sandbox, as /proc tells them, and ending those that must not stay."""

import _signal as signal  # type: ignore[import-not-found]
import posix as os
import time

from .frames import MARK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container

MAX_PASSES = 10
"""Sweeps for what is to end: each catches what was forked during the one before."""
MAX_ENVIRON = 1 << 17
"""Of a process's environment, bytes that are read: a sandbox full of longer ones would hold up every answer."""
CLOCK_BOOTTIME = 7  # `time` has the name since Python 3.7


def listed() -> "list[tuple[int, int]]":
    """(pid, parent) of every living process but PID 1."""
    processes = []
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                with open(f"/proc/{name}/stat", "rb") as handle:
                    state, parent = handle.read().rpartition(b")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if state not in (b"Z", b"X"):
                processes.append((int(name), int(parent)))
    return processes


def mark_of(pid: int) -> "str | None":
    """The mark a process was started with; None when it has none or shows none."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as handle:
            variables = handle.read(MAX_ENVIRON).split(b"\0")
    except OSError:
        return None
    start = MARK.encode() + b"="
    return next((v[len(start) :].decode(errors="replace") for v in variables if v.startswith(start)), None)


def sweep(ours: "Container[int]", is_meant: "Callable[[str], bool]", shell: int = 1, since: int = 0) -> None:
    """Kill what has a mark that is meant, and what has none and is an orphan or below one that is killed.

    ours: spared, with or without a mark. shell: what is below it without a mark goes, too. since: ticks
    of the clock that `started` tells; what is older is spared.
    Should more appear than can be killed one by one, everything in the sandbox goes: a bomb spares nothing.
    """
    killed = set()  # type: set[int]
    for _ in range(MAX_PASSES):
        targets = doomed(ours, is_meant, shell) - killed
        if since:
            targets = {pid for pid in targets if started(pid) >= since}
        if not targets:
            return
        for pid in targets:
            kill(pid)
        killed |= targets
    end_all()


def doomed(ours: "Container[int]", is_meant: "Callable[[str], bool]", shell: int) -> "set[int]":
    processes = [(pid, parent, mark_of(pid)) for pid, parent in listed() if pid not in ours]
    members = {1, shell}
    grown = True
    while grown:
        more = {
            pid for pid, parent, mark in processes if (parent in members if mark is None else is_meant(mark))
        } - members
        members |= more
        grown = bool(more)
    return members - {1, shell}


def started(pid: int) -> int:
    """When a process began, in clock ticks since boot; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as handle:
            return int(handle.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def ticks() -> int:
    """Now, on the clock of `started`."""
    return int(time.clock_gettime(CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def kill(pid: int) -> None:
    """One process, if it is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def end_all() -> None:
    """Kill every process but PID 1, at one stroke: the kernel lets none be forked meanwhile."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass
