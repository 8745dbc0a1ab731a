"""A program between a server and who started it: it leaves nothing of the server behind, however that one ends.

Run as a file, with the server's command as arguments. Its standard input is a pipe that nobody writes to: when the
other end is closed, by `kill -9` too, or on SIGTERM, it ends the command's process group. When the command ends by
itself, what it started ends with it, and its status is passed on. Standard library only, so that it starts at once.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

GRACE_S = 15.0
"""Between SIGTERM and SIGKILL: vLLM ends its engine in about five seconds."""


SUBREAPER = 36
"""Of prctl: what its descendants leave behind becomes this process's, not that of a PID 1 that may never look."""


def main(command: list[str]) -> int:
    """The command's status, negative for the signal that ended it."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    read, write = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(write, b"."))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    ended = os.pidfd_open(child.pid)
    if ended not in _ready(None, 0, read, ended):
        os.close(0)  # who looks whether anybody still reads it is told that the server is as good as gone
        _signal(os.killpg, child.pid, signal.SIGTERM)
        _ready(GRACE_S, ended)
    _signal(os.killpg, child.pid, signal.SIGKILL)
    status = child.wait()
    _end_children()
    return status


def _ready(timeout_s: float | None, *descriptors: int) -> list[int]:
    """Those that have ended or can be read, waiting for the first. poll, because select knows only low numbers."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]


def _end_children() -> None:
    """Also those that made a group of their own; returns when there are none."""
    mine = f"/proc/self/task/{os.getpid()}/children"
    with suppress(ChildProcessError):
        while True:
            with open(mine) as children:
                for pid in children.read().split():
                    _signal(os.kill, int(pid), signal.SIGKILL)
            os.waitpid(-1, 0)


def _signal(send: Callable[[int, int], None], to: int, number: int) -> None:
    with suppress(ProcessLookupError):
        send(to, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) % 256)
