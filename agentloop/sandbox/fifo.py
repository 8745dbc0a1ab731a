"""The host's end of a sandbox whose first process is a shell, because its image has no Python (`inside/pid1.sh`).

Orders are lines on a pipe. Every command has separate named pipes among the sockets (`pipes.py`). It offers
everything that `channel.Channel` does except a terminal and a proxy. A command costs some milliseconds instead of one.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from agentloop.errors import CapabilityError, SandboxGone
from agentloop.sandbox.inside.commands import CANNOT_START, FLOOD, HARD_CAP, BoundedOutput
from agentloop.sandbox.inside.frames import STREAM, TERMINAL
from agentloop.sandbox.pipes import KILLED, PipedCommand
from agentloop.sandbox.process import End, Incoming, Outgoing, Process, escaped
from agentloop.types import ExecResult

T = TypeVar("T")
NO_MOVE = "its first process does not end what runs"
NEEDS_PYTHON = "needs python3 in the image, whose first process is a shell; use an image with Python 3.6 or newer"
END_ALL = "end"
ENDED = "its first process ended"
MOVE_S = 10.0
"""Time for its first process to end everything and to read orders from another pipe. After that the sandbox is gone."""


class _Move:
    """A new pipe for orders. Both ends stay open until the first process has opened it."""

    def __init__(self, path: Path, timer: asyncio.TimerHandle) -> None:
        self.path = path
        self._timer = timer
        os.mkfifo(path)
        path.chmod(0o666)  # the sandbox may be another user
        # Both ways, so that opening the pipe blocks neither this process nor the shell.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def end(self) -> None:
        """Removes the name, which is no longer needed."""
        self._timer.cancel()
        os.close(self._fd)
        self.path.unlink(missing_ok=True)


class Fifos:
    """See `channel.SandboxConnection`."""

    def __init__(self, sockets: Path, orders: int, lifetime_s: float | None = None) -> None:
        """orders: the write end of the pipe that the shell reads, non-blocking.

        lifetime_s: the sandbox ends after that time. Its shell cannot enforce this itself.
        """
        self.gone: End | None = None
        self.cause: Callable[[bool], str | None] = lambda _: None
        self._sockets = sockets
        self._orders = orders
        self._n = 0
        self._unsent = bytearray()
        self._move: _Move | None = None
        self._held: list[str] = []
        self._running: set[PipedCommand] = set()
        self._queued: dict[object, str] = {}
        # The same bound as that of the Python supervisor (`pid1.Supervisor.limit`).
        self._places = asyncio.Semaphore(2 * (os.cpu_count() or 1))
        self._loop = asyncio.get_running_loop()
        # The write end of a pipe becomes readable only by an error: nobody has the read end open any more.
        self._loop.add_reader(orders, self._left)
        self._at_end: asyncio.TimerHandle | None = None
        if lifetime_s is not None:
            self._at_end = self._loop.call_later(lifetime_s, self.close, "its lifetime is over")

    async def exec(self, command: str, *, lease: str, timeout_s: float, max_output: int) -> ExecResult:
        """See `channel.Channel.exec`."""
        ticket = object()
        self._queued[ticket] = lease
        try:
            async with self._places:
                if self._queued.pop(ticket, None) is None:
                    return ExecResult(exit_code=KILLED, stdout="", stderr="discarded before it started\n", duration_s=0)
                return await self._exec(self._begun(command, lease, 0), timeout_s, max_output)
        finally:
            self._queued.pop(ticket, None)

    async def _exec(self, running: PipedCommand, timeout_s: float, max_output: int) -> ExecResult:
        cap = max(HARD_CAP * max_output, FLOOD)
        outputs = [BoundedOutput(-1, max_output, cap), BoundedOutput(-1, max_output, cap)]
        reading = [_seen(_keep(running, name, output)) for name, output in zip(("out", "err"), outputs, strict=True)]
        try:
            done = await asyncio.shield(_seen(running.finish(max(0.0, timeout_s))))
            await asyncio.gather(*reading)
        finally:
            running.abandon()
        (out, lost_out), (err, lost_err) = (output.contents() for output in outputs)
        if any(output.total > cap for output in outputs):
            err += f"[killed: it printed more than {cap} bytes]\n".encode()
        if done.exit_code == CANNOT_START and not running.began:
            err += b"cannot start: the sandbox has no room for another process\n"
        texts = {"stdout": out.decode(errors="replace"), "stderr": err.decode(errors="replace")}
        return done.model_copy(update={**texts, "dropped": lost_out + lost_err})

    def start(self, command: str, *, lease: str, how: int = 0, size: tuple[int, int] = (24, 80)) -> Process:
        """See `channel.Channel.start`. Raises CapabilityError for a terminal."""
        if how & TERMINAL:
            raise CapabilityError(f"a terminal {NEEDS_PYTHON}")
        running = self._begun(command, lease, how | STREAM)
        return Process(
            running.outgoing.get("in") or Outgoing(lambda _: None),
            running.incoming["out"],
            running.incoming["err"],
            running.control,
            _seen(running.finish(None)),
            running.outgoing.get("orders"),
            running.incoming.get("records"),
        )

    def discard(self, lease: str) -> None:
        """See `channel.Channel.discard`."""
        self._queued = {ticket: name for ticket, name in self._queued.items() if lease and name != lease}
        with suppress(SandboxGone):
            self._order(f"discard {lease}" if lease else END_ALL)

    def listen(self, on_open: Callable[[Incoming, Outgoing], Awaitable[None]]) -> None:
        """Raises CapabilityError: a shell cannot connect to a proxy."""
        raise CapabilityError(f"a way to allowed_hosts or to a gateway {NEEDS_PYTHON}")

    def close(self, reason: str = "it was closed") -> None:
        """See `channel.Channel.close`."""
        self._end(End(reason))

    def _end(self, end: End) -> None:
        if self.gone is not None:
            return
        self.gone = end
        if self._at_end:
            self._at_end.cancel()
        self._shut()
        if self._move:
            self._move.end()
        for running in list(self._running):
            running.lose(end)

    def _begun(self, command: str, lease: str, how: int) -> PipedCommand:
        """Raises SandboxGone, or SandboxError if its pipes cannot be created."""
        self._must_stand()
        self._n += 1
        owner = lease or "-"
        running = PipedCommand(self._sockets / secrets.token_hex(12), f"{owner}.{self._n}.", how, self._order)
        self._running.add(running)
        running.closed.add_done_callback(lambda _: self._running.discard(running))
        flags = f"{int('in' in running.outgoing)} {int('orders' in running.outgoing)}"
        # printf's \c ends the text, so that the shell which reads the line has no blanks to strip from it.
        self._order(f"run {running.path.name} {owner} {self._n} {flags} {escaped(command)}\\c")
        return running

    def _must_stand(self) -> None:
        if self.gone is not None:
            raise self.gone.error()

    def _order(self, line: str) -> None:
        """Sends the shell one line when it can read it. Raises SandboxGone."""
        self._must_stand()
        if self._move:
            self._held.append(line)
            return
        if line == END_ALL:
            # A command can write to its first process's pipe, and would so begin another that outlives everything.
            self._move = _Move(
                self._sockets / secrets.token_hex(12), self._loop.call_later(MOVE_S, self.close, NO_MOVE)
            )
            line += f" {self._move.path.name}"
        self._unsent += line.encode(errors="replace") + b"\n"
        self._flush()
        self._must_stand()

    def _left(self) -> None:
        """Nobody reads the orders: the first process ended, or reads another pipe now."""
        if self._move is None or self._unsent:
            self._end(End(ENDED, self.cause(False)))
            return
        move, self._move = self._move, None
        self._shut()
        self._orders = os.open(move.path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        move.end()
        self._loop.add_reader(self._orders, self._left)
        # Orders that came during the move were not written: they would have gone to the pipe that nobody reads.
        held, self._held = self._held, []
        with suppress(SandboxGone):
            for line in held:
                self._order(line)

    def _shut(self) -> None:
        self._loop.remove_reader(self._orders)
        self._loop.remove_writer(self._orders)
        os.close(self._orders)

    def _flush(self) -> None:
        try:
            del self._unsent[: os.write(self._orders, self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._end(End(ENDED, self.cause(False)))
            return
        if self._unsent:
            self._loop.add_writer(self._orders, self._flush)
        else:
            self._loop.remove_writer(self._orders)


async def _keep(running: PipedCommand, name: str, output: BoundedOutput) -> None:
    async for data in running.incoming[name]:
        output.take(data)
        if output.total > output.cap:
            running.kill()
            return


def _seen(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task whose failure is expected, in case nobody waits for it."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
