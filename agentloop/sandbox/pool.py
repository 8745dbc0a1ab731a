"""Leases of boxes: one shared box for episodes that only read, a fresh box for each that writes.

Reset means discard: a box that was written to is never used again. A shared box that died is
replaced at the next lease; those who were using it get SandboxGone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentloop.protocols import Sandbox, SandboxBackend
from agentloop.sandbox.box import Lease
from agentloop.types import SandboxSpec

MAX_BOXES = 8 * (os.cpu_count() or 1)
"""Boxes of their own that exist at once; further leases wait."""


class SandboxPool:
    """Boxes of one backend. Close it, or leave boxes to die with this process."""

    def __init__(self, backend: SandboxBackend) -> None:
        self.backend = backend
        self._shared: dict[SandboxSpec, asyncio.Task[Sandbox]] = {}
        self._own = asyncio.Semaphore(MAX_BOXES)

    @property
    def isolation(self) -> str:
        """What its boxes are made of; recorded on every trace."""
        return self.backend.isolation

    @asynccontextmanager
    async def lease(self, spec: SandboxSpec, lease_id: str) -> AsyncIterator[Sandbox]:
        """A box as `spec` says, for one episode; what the episode wrote is discarded afterwards."""
        if spec.read_only:
            lease = Lease(await self._shared_box(spec), lease_id)  # type: ignore[arg-type]
            try:
                yield lease
            finally:
                await lease.close()
        else:
            async with self._own:
                box = await self.backend.create(spec)
                try:
                    yield box
                finally:
                    await box.close()

    async def close(self) -> None:
        """End every shared box; leased ones end with their leases."""
        tasks, self._shared = list(self._shared.values()), {}
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is None:
                await task.result().close()
            else:
                task.cancel()

    async def _shared_box(self, spec: SandboxSpec) -> Sandbox:
        task = self._shared.get(spec)
        if task is None or (task.done() and (task.cancelled() or task.exception() or task.result().gone)):  # type: ignore[attr-defined]
            if task is not None and task.done() and not task.cancelled() and not task.exception():
                await task.result().close()
            task = self._shared[spec] = asyncio.ensure_future(self.backend.create(spec))
        return await asyncio.shield(task)
