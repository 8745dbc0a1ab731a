"""The host's end of a box's one connection: many commands at once, each with a future of its own.

The host listens on a unix socket whose folder the box sees read-only, accepts exactly one peer, and
removes the socket before any command runs. When the connection ends, everything that waits on it
and everything that comes after gets SandboxGone.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from agentloop.errors import SandboxError, SandboxGone, SandboxUnavailable
from agentloop.sandbox.supervisor import DISCARD, DONE, EXEC, HEADER, READY, REQUEST, RESULT
from agentloop.types import ExecResult

START_TIMEOUT_S = 30.0
"""Creating a container on a busy machine takes seconds; this is when it counts as failed."""
WATCH_S = 0.1
"""How often a box that is starting is asked whether it ended instead."""
DOORS = Path("/tmp")  # noqa: S108 - short, because a unix socket's path has at most 107 bytes
MAX_U32 = 0xFFFFFFFF


class Channel(asyncio.Protocol):
    """One connection to one supervisor."""

    def __init__(self) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._pending: dict[int, asyncio.Future[ExecResult]] = {}
        self._buffer = bytearray()
        self._next = 0
        self.gone: str | None = None
        """Why the connection ended; None while it stands."""

    async def exec(self, command: str, *, lease: str, timeout_s: float, max_output: int) -> ExecResult:
        """Run one command in the box. Raises SandboxGone when the box is or goes away.

        Cancelling the call kills the command. Its time counts from when the box starts it: more than
        the box runs at once wait there in order.
        """
        self._next += 1
        ident, name = self._next, lease.encode()
        future: asyncio.Future[ExecResult] = asyncio.get_running_loop().create_future()
        limits = (min(max(0.0, timeout_s) * 1000, MAX_U32), min(max(0, max_output), MAX_U32))
        head = REQUEST.pack(*map(int, limits), len(name))
        # A NUL would end the command early and a lone surrogate has no bytes; neither can be meant.
        text = command.replace("\0", "").encode(errors="replace")
        self._write(ident, EXEC, head + name + text)
        self._pending[ident] = future
        try:
            return await future
        except asyncio.CancelledError:
            if self.gone is None:
                self._write(ident, DISCARD, b"")
            raise
        finally:
            self._pending.pop(ident, None)

    def discard(self, lease: str) -> None:
        """End and remove what a lease left in the box; a box that is gone has nothing left."""
        if self.gone is None:
            self._write(0, DISCARD, lease.encode())

    def close(self, reason: str = "it was closed") -> None:
        """End the connection, and with it the box."""
        self._lost(reason)
        if self._transport:
            self._transport.close()

    def _write(self, ident: int, kind: int, payload: bytes) -> None:
        if self.gone is not None or self._transport is None:
            raise SandboxGone(f"the sandbox is gone: {self.gone}")
        self._transport.write(HEADER.pack(ident, kind, len(payload)) + payload)

    # ------------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The supervisor connected."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Bytes of frames, in pieces of any size."""
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            ident, kind, length = HEADER.unpack_from(self._buffer)
            if len(self._buffer) < HEADER.size + length:
                return
            payload = bytes(self._buffer[HEADER.size : HEADER.size + length])
            del self._buffer[: HEADER.size + length]
            if kind == READY and not self.ready.done():
                self._ready(payload.decode(errors="replace"))
            elif kind == DONE:
                self._done(ident, payload)

    def _ready(self, problem: str) -> None:
        if problem:
            self.ready.set_exception(SandboxUnavailable(f"the box cannot be used: {problem}"))
        else:
            self.ready.set_result(None)

    def _done(self, ident: int, payload: bytes) -> None:
        future = self._pending.pop(ident, None)
        if future and not future.done():
            future.set_result(_result(payload))

    def connection_lost(self, exc: Exception | None) -> None:
        """The box died, or was closed."""
        self._lost(str(exc) if exc else "its supervisor ended")

    def _lost(self, reason: str) -> None:
        if self.gone is None:
            self.gone = reason
        waiting: list[asyncio.Future[Any]] = [self.ready, *self._pending.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(SandboxGone(f"the sandbox is gone: {self.gone}"))
                future.exception()  # seen, should nobody be waiting
        self._pending.clear()


def _result(payload: bytes) -> ExecResult:
    code, timed_out, dropped, micros, n_out = RESULT.unpack_from(payload)
    out = payload[RESULT.size : RESULT.size + n_out]
    return ExecResult(
        exit_code=code,
        stdout=out.decode(errors="replace"),
        stderr=payload[RESULT.size + n_out :].decode(errors="replace"),
        timed_out=bool(timed_out),
        dropped=dropped,
        duration_s=micros / 1e6,
    )


class Door:
    """A private folder with a listening socket in it, for exactly one box."""

    def __init__(self) -> None:
        # Private, because whoever connects first is the box; the inner folder is what the box sees.
        self._private = Path(tempfile.mkdtemp(prefix=f"agentloop-{os.getpid()}-", dir=DOORS))
        self.folder = self._private / "door"
        self.folder.mkdir()
        self.folder.chmod(0o755)
        self._server: asyncio.Server | None = None
        self._channel: Channel | None = None

    async def open(self) -> None:
        """Listen. Raises SandboxError when no socket can be made."""
        self._channel = channel = Channel()
        taken = False

        def once() -> asyncio.Protocol:
            nonlocal taken
            if taken:
                return _Refused()
            taken = True
            return channel

        path = self.folder / "s"
        try:
            # In two steps, because a cancellation within the first would lose the server unclosed.
            self._server = await asyncio.get_running_loop().create_unix_server(once, path, start_serving=False)
            path.chmod(0o666)
            await self._server.start_serving()
        except OSError as error:
            raise SandboxError(f"cannot listen on {path}: {error.strerror}; make {DOORS} writable") from error

    async def entered(self, ended: Callable[[], Awaitable[bool]]) -> Channel:
        """The channel, once the supervisor is there; nobody else can enter after that.

        ended: whether what was started to make the box is over. Raises SandboxGone when it is, or
        when nobody came in START_TIMEOUT_S.
        """
        if self._channel is None:
            raise SandboxError("a door must be opened before anyone can enter")
        ready = self._channel.ready
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not ready.done():
                    await asyncio.wait({ready}, timeout=WATCH_S)
                    if not ready.done() and await ended() and not ready.done():
                        raise SandboxGone("it ended before its supervisor connected")
            await ready
        except TimeoutError:
            raise SandboxGone(f"its supervisor did not connect in {START_TIMEOUT_S:g} s") from None
        finally:
            self._shut()
        return self._channel

    def remove(self) -> None:
        """The folder and whatever is in it; a connection that came through it ends."""
        self._shut()
        if self._channel:
            self._channel.close()
        shutil.rmtree(self._private, ignore_errors=True)

    def _shut(self) -> None:
        if self._server:
            self._server.close()
            self._server = None
            (self.folder / "s").unlink(missing_ok=True)


def sweep_doors() -> None:
    """Remove the folders of this user's processes that were killed before they could do it."""
    for folder in DOORS.glob("agentloop-*-*"):
        owner = folder.name.split("-")[1]
        if owner.isdecimal() and not is_alive(int(owner)):
            with suppress(OSError):  # another user's, or swept by someone else meanwhile
                if folder.lstat().st_uid == os.getuid():
                    shutil.rmtree(folder)


def is_alive(pid: int) -> bool:
    """Whether a process of that number exists, whoever owns it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


class _Refused(asyncio.Protocol):
    """A second peer: shown out."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
