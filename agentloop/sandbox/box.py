"""A running box, and one episode's lease of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agentloop.sandbox.channel import Channel, Door
from agentloop.types import ExecResult


class Box:
    """A box that was created: `close` ends every process in it and removes what it had on the host."""

    def __init__(self, box_id: str, isolation: str, channel: Channel, door: Door, end: Callable[[], None]) -> None:
        """end: blocks until the box's processes are gone; called once."""
        self.id, self.isolation = box_id, isolation
        self._channel, self._door, self._end = channel, door, end
        self._closed = False

    @property
    def gone(self) -> bool:
        """True once nothing can run in it any more."""
        return self._channel.gone is not None

    async def exec(
        self, command: str, *, timeout_s: float = 30.0, max_output: int = 16_384, lease: str = "box"
    ) -> ExecResult:
        """See `protocols.Sandbox`; `lease` names the scratch folder."""
        return await self._channel.exec(command, lease=lease, timeout_s=timeout_s, max_output=max_output)

    def discard(self, lease: str) -> None:
        """Remove a lease's processes and scratch folder."""
        self._channel.discard(lease)

    async def close(self) -> None:
        """See `protocols.Sandbox`."""
        if not self._closed:
            self._closed = True
            self._channel.close()
            await asyncio.to_thread(self._end)
            self._door.remove()


class Lease:
    """One episode's share of a box that several use."""

    def __init__(self, box: Box, name: str) -> None:
        self._box, self._name = box, name
        self.id, self.isolation = f"{box.id}/{name[:8]}", box.isolation

    async def exec(self, command: str, *, timeout_s: float = 30.0, max_output: int = 16_384) -> ExecResult:
        """See `protocols.Sandbox`."""
        return await self._box.exec(command, timeout_s=timeout_s, max_output=max_output, lease=self._name)

    async def close(self) -> None:
        """Discard the scratch folder and what still runs; the box stays."""
        self._box.discard(self._name)
