"""One command of a sandbox whose first process is a shell, and the host's ends of its named pipes.

The shell opens its ends and reports that. Then the names are removed, and nobody else can open the pipes. A command's
output is read only while somebody consumes it, so a slow reader slows down the command.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from agentloop.errors import SandboxError, SandboxGone
from agentloop.sandbox.inside.commands import CANNOT_START, ENDLESS
from agentloop.sandbox.inside.flow import n_waiting
from agentloop.sandbox.inside.frames import CHUNK, CONTROL, FOREGROUND, STREAM, WINDOW
from agentloop.sandbox.inside.processes import ticks
from agentloop.sandbox.process import End, Incoming, Outgoing
from agentloop.types import ExecResult

TERM_S = 0.1
"""Time for a command to end by itself after its timeout."""
GIVE_UP_S = 0.3
"""Time to wait for the end of a killed command."""
KILLED = 128 + signal.SIGKILL


class PipedCommand:
    """A command that was ordered, or will be; `outgoing` and `incoming` are its channels by name."""

    def __init__(self, path: Path, mark: str, how: int, order: Callable[[str], None]) -> None:
        """Creates the pipes, at `path` plus a suffix each. Raises SandboxError if that is impossible.

        mark: in the environment of all its processes. order: sends one line to the shell; raises SandboxGone.
        """
        self.path = path
        self.mark = mark
        self.started = time.monotonic()
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when none of its pipes is open any more."""
        self._ordered = order
        self._loop = asyncio.get_running_loop()
        self._pid = self._signal = 0
        self._over = self._abandoned = self._lost = False
        self._late: asyncio.Future[None] | None = None
        self._since = 0
        """Time of the session's latest order, in clock ticks since boot."""
        self._fds: dict[str, int] = {}
        inward: list[str] = []
        outward = ["end", "out", "err"]
        if how & CONTROL:
            inward = ["orders"]
            outward.append("records")
        elif how & STREAM:
            inward = ["in"]
        self._unwritten: dict[str, bytearray] = {name: bytearray() for name in inward}
        self._ended: set[str] = set()
        self._unread = dict.fromkeys(outward, 0)
        self._left = dict.fromkeys(outward, ENDLESS)
        self.outgoing = {name: Outgoing(partial(self._send, name)) for name in inward}
        self.incoming = {name: Incoming(partial(self._grant, name)) for name in outward}
        try:
            for name in [*inward, *outward]:
                self._make(name)
        except OSError as error:
            self.close()
            raise SandboxError(
                f"cannot make a pipe in {path.parent}: {error.strerror}; close sandboxes that are not used"
            ) from error
        for name in outward:
            self._loop.add_reader(self._fds[name], self._read, name)

    @property
    def began(self) -> bool:
        """True if its shell is known to have started."""
        return bool(self._pid)

    # ----------------------------------------------------------------------- its end

    async def finish(self, timeout_s: float | None) -> ExecResult:
        """Waits for its end, and ends it after the timeout. The output is on the channels. Raises SandboxGone."""
        timed_out = False
        try:
            async with asyncio.timeout(timeout_s):
                code = await self._end()
        except TimeoutError:
            timed_out = True
            code = await self._stopped()
        if timed_out and not (self._pid or self._over):
            self._late = asyncio.ensure_future(self._end_late())
        else:
            self._finish()
        elapsed = time.monotonic() - self.started
        return ExecResult(exit_code=code, stdout="", stderr="", timed_out=timed_out, duration_s=elapsed)

    async def _end_late(self) -> None:
        """Keeps the pipes of a command until it has begun; otherwise its shell would wait for somebody to open them."""
        self.abandon()
        with suppress(SandboxGone):
            await self._end()
        self._finish()

    def _finish(self) -> None:
        """Everything printed so far can still be read; later output of a surviving child is dropped."""
        self._over = True
        if self._abandoned:
            self._sweep()
            self.close()
        for name in list(self._fds):
            if name in self.outgoing:
                self._shut(name)
            else:
                self._left[name] = n_waiting(self._fds[name])
                self._drain(name)

    async def _end(self) -> int:
        """The exit code, which the shell sends after the pid. Without it, the command never began, or the process that
        reports it is gone."""
        while data := await self.incoming["end"].read():
            for word in data.split():
                if not word.isdigit():  # no shell says that
                    return KILLED
                if self._pid or self._over:
                    return int(word) % 256
                self._pid = int(word)
                self._over = not self._pid  # it could not be started; the reason's code follows
                self._entered()
        self._sweep()
        return KILLED if self._pid else CANNOT_START

    async def _stopped(self) -> int:
        """Its exit code after SIGTERM and, if necessary, SIGKILL."""
        code = KILLED
        for number, wait_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, GIVE_UP_S)):
            self.kill(number)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    code = await self._end()
                    break
        self._sweep()
        return code

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to its process group, as soon as there is one."""
        self._signal = number
        if self._pid and not self._over:
            self._order(f"kill {self._pid} {int(number)}")

    def _sweep(self) -> None:
        """Ends what is left of it, even outside its process group."""
        self.kill()
        self._order(f"sweep {self.mark}")

    def abandon(self) -> None:
        """Ends it and everything that it started. Readers and writers of its channels return."""
        self._abandoned = True
        if self._over:
            self.close()
        self.kill()
        self._give_up()
        for name in self.incoming.keys() - {"end"}:
            self.incoming[name].feed(b"")
        for outgoing in self.outgoing.values():
            outgoing.stop()

    def control(self, what: str, numbers: tuple[int, ...]) -> None:
        """See `process.Process`."""
        if what == "kill":
            self.abandon()
        elif what == "signal" and numbers[0] == FOREGROUND:
            self._order(f"foreground {self._pid} {self.mark} {self._since}")
        elif what == "signal":
            self.kill(numbers[0])

    def lose(self, end: End) -> None:
        """Called when the sandbox is gone."""
        self._lost = True
        for incoming in self.incoming.values():
            incoming.lose(end)
        for outgoing in self.outgoing.values():
            outgoing.lose(end)
        self.close()

    def close(self) -> None:
        """Closes every pipe."""
        for name in list(self._fds):
            self._shut(name)
        self._unlink()

    def _order(self, line: str) -> None:
        with suppress(SandboxGone):
            self._ordered(line)

    # ------------------------------------------------------------------ opening, closing

    def _make(self, name: str) -> None:
        path = f"{self.path}.{name}"
        os.mkfifo(path)
        os.chmod(path, 0o666)  # noqa: S103 - the sandbox may be another user
        # An end for writing is opened both ways at first, because nobody reads it yet.
        mode = os.O_RDWR if name in self.outgoing else os.O_RDONLY
        self._fds[name] = os.open(path, mode | os.O_NONBLOCK | os.O_CLOEXEC)

    def _entered(self) -> None:
        """Opens our ends for writing alone, now that the shell has opened its own. Had ours been closed before, the
        shell would have waited there."""
        for name in [name for name in self._fds if name in self.outgoing]:
            try:
                ours = os.open(f"{self.path}.{name}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:  # nobody reads it any more
                self._shut(name)
                continue
            os.close(self._fds[name])
            self._fds[name] = ours
            self._push(name)
        self._unlink()
        if self._signal:
            self.kill(self._signal)
        if self._abandoned:
            self._give_up()

    def _give_up(self) -> None:
        """Limits the wait for its end: a command can stop the process that reports it."""
        if self._pid and not self._over:
            self._loop.call_later(GIVE_UP_S, self.incoming["end"].feed, b"")

    def _unlink(self) -> None:
        for name in (*self.incoming, *self.outgoing):
            with suppress(OSError):
                os.unlink(f"{self.path}.{name}")

    def _end_of(self, name: str) -> None:
        self._shut(name)
        if name in self.incoming:
            self.incoming[name].feed(b"")

    def _shut(self, name: str) -> None:
        fd = self._fds.pop(name, -1)
        if fd >= 0:
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)
            os.close(fd)
        if name in self.outgoing and not self._lost:
            self.outgoing[name].stop()
        if not self._fds and not self.closed.done():
            self.closed.set_result(None)

    # ---------------------------------------------------------------- out of the sandbox

    def _grant(self, name: str, n: int) -> None:
        self._unread[name] -= n
        for other in [other for other in self._fds if other in self.incoming]:
            if self._over:
                self._drain(other)
            elif self._unread[other] < WINDOW:
                self._loop.add_reader(self._fds[other], self._read, other)

    def _drain(self, name: str) -> None:
        while self._read(name):
            pass

    def _read(self, name: str) -> bool:
        """Reads one piece. True if there may be more."""
        if name not in self._fds:
            return False
        if self._unread[name] >= WINDOW or (name == "records" and not self._printed()):
            self._loop.remove_reader(self._fds[name])  # until something is granted
            return False
        try:
            data = os.read(self._fds[name], min(CHUNK, self._left[name]))
        except BlockingIOError:
            return False
        self._left[name] -= len(data)
        self._unread[name] += len(data)
        if data:
            self.incoming[name].feed(data)
        if not data or not self._left[name]:
            self._end_of(name)
            return False
        return True

    def _printed(self) -> bool:
        """True if everything that was printed before a record is on its way."""
        for name in ("out", "err"):
            self._drain(name)
        return all(self._unread[name] < WINDOW for name in ("out", "err") if name in self._fds)

    # -------------------------------------------------------------------- into the sandbox

    def _send(self, name: str, data: bytes) -> None:
        if name == "orders":
            self._since = ticks()
        self._unwritten[name] += data
        if not data:
            self._ended.add(name)
        if name in self._fds and self._pid:
            self._push(name)

    def _push(self, name: str) -> None:
        fd = self._fds[name]
        waiting = self._unwritten[name]
        try:
            n = os.write(fd, waiting) if waiting else 0
        except BlockingIOError:
            n = 0
        except OSError:  # nobody reads it any more
            self._shut(name)
            return
        del waiting[:n]
        self.outgoing[name].grant(n)
        if waiting:
            self._loop.add_writer(fd, self._push, name)
        elif name in self._ended:
            self._shut(name)
        else:
            self._loop.remove_writer(fd)
