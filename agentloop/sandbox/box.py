"""A running box, and one episode's lease of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from agentloop.errors import SandboxGone
from agentloop.protocols import Sandbox
from agentloop.sandbox.channel import Channel, Door
from agentloop.types import ExecResult


@runtime_checkable
class SharedBox(Sandbox, Protocol):
    """A sandbox that several episodes may use at once, each under a lease's name."""

    @property
    def gone(self) -> bool:
        """True once nothing can run in it any more."""
        ...

    async def exec(
        self, command: str, *, timeout_s: float = 30.0, max_output: int = 16_384, lease: str = "box"
    ) -> ExecResult:
        """See `protocols.Sandbox`; `lease` names the scratch folder."""
        ...

    def discard(self, lease: str) -> None:
        """Remove a lease's processes and scratch folder; harmless for a box that is gone."""
        ...


class Box:
    """A box that was created: `close` ends every process in it and removes what it had on the host."""

    def __init__(self, box_id: str, isolation: str, channel: Channel, door: Door, end: Callable[[], None]) -> None:
        """end: blocks until the box's processes are gone; called once, in a thread."""
        self.id, self.isolation = box_id, isolation
        self._channel, self._door, self._end = channel, door, end
        self._closing: asyncio.Future[None] | None = None

    @property
    def gone(self) -> bool:
        """See `SharedBox`."""
        return self._channel.gone is not None

    async def exec(
        self, command: str, *, timeout_s: float = 30.0, max_output: int = 16_384, lease: str = "box"
    ) -> ExecResult:
        """See `SharedBox`."""
        return await self._channel.exec(command, lease=lease, timeout_s=timeout_s, max_output=max_output)

    def discard(self, lease: str) -> None:
        """See `SharedBox`."""
        self._channel.discard(lease)

    async def close(self) -> None:
        """See `protocols.Sandbox`; whoever closes second waits for the same end."""
        if self._closing is None:
            self._channel.close()
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await asyncio.to_thread(self._end)
        finally:
            self._door.remove()


class Lease:
    """One episode's share of a box that several use."""

    def __init__(self, box: SharedBox, name: str) -> None:
        """name: becomes the scratch folder's, with what does not belong in a file name replaced."""
        self._box, self._name = box, re.sub(r"[^A-Za-z0-9_-]", "_", name)[:200]
        self.id, self.isolation = f"{box.id}/{self._name[:8]}", box.isolation
        self._closed = False

    async def exec(self, command: str, *, timeout_s: float = 30.0, max_output: int = 16_384) -> ExecResult:
        """See `protocols.Sandbox`."""
        if self._closed:
            raise SandboxGone(f"the sandbox is gone: the lease {self.id} was closed")
        return await self._box.exec(command, timeout_s=timeout_s, max_output=max_output, lease=self._name)

    async def close(self) -> None:
        """Discard the scratch folder and what still runs; the box stays."""
        if not self._closed:
            self._closed = True
            self._box.discard(self._name)
