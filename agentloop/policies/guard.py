"""A program between a server and its owner, which ensures that nothing of the server survives the owner.

It runs as a script, with the server's command as arguments. Nobody writes to its standard input. When the other end is
closed, even by `kill -9`, or on SIGTERM, it ends the command's process group. If the command ends by itself, everything
it started ends too, and its status is returned. It uses the standard library only, so that it starts at once.
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
"""Time between SIGTERM and SIGKILL. vLLM ends its engine in about five seconds."""


SUBREAPER = 36
"""Option of prctl: orphaned descendants become children of this process, not of a PID 1 that may never reap them."""


def main(command: list[str]) -> int:
    """The command's status, negative for the signal that ended it."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    # Python resumes `poll` after a signal (PEP 475), so a handler must make a descriptor readable.
    read, write = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(write, b"."))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    # It becomes readable when the command ends, and never stands for another process with the same number.
    ended = os.pidfd_open(child.pid)
    if ended not in _ready(None, 0, read, ended):
        os.close(0)  # whoever checks the other end sees a pipe without a reader: the server is ending
        _signal(os.killpg, child.pid, signal.SIGTERM)
        _ready(GRACE_S, ended)
    _signal(os.killpg, child.pid, signal.SIGKILL)
    status = child.wait()
    _end_children()
    return status


def _ready(timeout_s: float | None, *descriptors: int) -> list[int]:
    """The descriptors that have ended or are readable, waiting for the first. poll, because select supports only low
    numbers."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]


def _end_children() -> None:
    """Ends all children, including those with process groups of their own, and waits for them."""
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
    # The negative status of a signal must fit into 0 to 255.
    sys.exit(main(sys.argv[1:]) % 256)
