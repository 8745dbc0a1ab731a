"""A command that is used while it runs: its channels, its signals, its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from agentloop.errors import SandboxGone
from agentloop.sandbox.inside.frames import CHUNK, FOREGROUND, WINDOW
from agentloop.types import ExecResult

MAX_SIGNAL = 65
"""One above the last signal of Linux."""
MAX_SIDE = 65_535
"""Rows or columns of a terminal: the kernel stores each in 16 bits."""


@dataclass(frozen=True)
class End:
    """Why a sandbox cannot be used any more."""

    reason: str
    cause: str | None = None
    """See `SandboxGone`."""

    def error(self) -> SandboxGone:
        """For whoever uses it."""
        return SandboxGone(f"the sandbox is gone: {self.reason}", cause=self.cause)


class Incoming:
    """Bytes from the sandbox. What is not read here is, beyond a window, not read there either."""

    def __init__(self, grant: Callable[[int], None]) -> None:
        """grant: tells the sandbox that so many bytes more may be sent."""
        self._grant = grant
        self._waiting = bytearray()
        self._ended = False
        self._gone: End | None = None
        self._wake = asyncio.Event()

    def feed(self, data: bytes) -> None:
        """What came; nothing is the end. What comes after the end is dropped."""
        if not data:
            self._ended = True
        elif not self._ended:
            self._waiting += data
        self._wake.set()

    def lose(self, end: End) -> None:
        """The sandbox is gone: what came is still read, then SandboxGone is raised."""
        self._gone = self._gone or end
        self._wake.set()

    @property
    def n_waiting(self) -> int:
        """Bytes that came and were not read yet."""
        return len(self._waiting)

    async def read(self) -> bytes:
        """The next bytes, at most CHUNK; b"" at the end. Raises SandboxGone when the sandbox died before it."""
        while not self._waiting:
            if self._ended:
                return b""
            if self._gone is not None:
                raise self._gone.error()
            self._wake.clear()
            await self._wake.wait()
        data = bytes(self._waiting[:CHUNK])
        del self._waiting[:CHUNK]
        self._grant(len(data))
        return data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while data := await self.read():
            yield data


class Outgoing:
    """Bytes into the sandbox, as fast as they are taken there."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        """send: puts one piece on its way; b"" is the end."""
        self._send = send
        self._room = WINDOW
        self._closed = False
        self.stopped = False
        """Nobody takes anything any more."""
        self._gone: End | None = None
        self._wake = asyncio.Event()

    def grant(self, n: int) -> None:
        """The sandbox has taken `n` bytes."""
        self._room += n
        self._wake.set()

    def stop(self) -> None:
        """The other end was closed, or what read there is over."""
        self.stopped = True
        self._wake.set()

    def lose(self, end: End) -> None:
        """The sandbox is gone."""
        self._gone = self._gone or end
        self._wake.set()

    async def write(self, data: bytes) -> None:
        """Returns when all of it is on its way. Raises SandboxGone; what nobody takes any more is dropped."""
        if self._closed:
            raise ValueError("nothing can be written after close()")
        view = memoryview(data)
        while view and not self.stopped:
            if self._gone is not None:
                raise self._gone.error()
            if self._room <= 0:
                self._wake.clear()
                await self._wake.wait()
                continue
            n = min(CHUNK, self._room, len(view))
            self._room -= n
            self._send(bytes(view[:n]))
            view = view[n:]

    def close(self) -> None:
        """The end of the channel."""
        if not self._closed and self._gone is None:
            self._closed = True
            if not self.stopped:
                self._send(b"")


class Process:
    """A running command. Read both outputs, or it will wait for that once a window is full."""

    def __init__(
        self,
        stdin: Outgoing,
        stdout: Incoming,
        stderr: Incoming,
        control: Callable[[str, tuple[int, ...]], None],
        done: asyncio.Future[ExecResult],
        orders: Outgoing | None = None,
        records: Incoming | None = None,
    ) -> None:
        """control: `signal` with a number, `resize` with rows and columns, or `kill`.

        orders, records: what a session's shell is to run and how that ended; see `session.py`.
        """
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self.orders = orders
        self.records = records
        self._control = control
        self._done = done

    async def wait(self) -> ExecResult:
        """Its end; the output is on the channels. Raises SandboxGone when the sandbox dies first."""
        return await asyncio.shield(self._done)

    def signal(self, number: int) -> None:
        """Send a signal to its process group; to a session's shell also FOREGROUND. Raises ValueError for another."""
        if number != FOREGROUND and not 0 < number < MAX_SIGNAL:
            raise ValueError(f"signal {number}; there are 1 to {MAX_SIGNAL - 1}")
        self._control("signal", (number,))

    def resize(self, rows: int, columns: int) -> None:
        """Tell its terminal a new size; no effect without one. Raises ValueError for one that no terminal has."""
        if not (0 < rows <= MAX_SIDE and 0 < columns <= MAX_SIDE):
            raise ValueError(f"a terminal of {rows} rows and {columns} columns; each is 1 to {MAX_SIDE}")
        self._control("resize", (rows, columns))

    def kill(self) -> None:
        """End it and all that it started, now; its channels end, and whoever reads or writes them goes on."""
        self._control("kill", ())


def escaped(command: str) -> str:
    """A command in one line, as printf's %b reads it; a NUL would end it early and cannot be meant."""
    return command.replace("\0", "").replace("\\", "\\0134").replace("\n", "\\0012")
