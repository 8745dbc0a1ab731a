"""Leases of sandboxes: one shared sandbox for episodes that only read, a fresh sandbox for each that writes.

Fresh sandboxes are kept ready (`stock.py`). Reset means discard: a sandbox that was written to is never used
again. A shared sandbox that died is
replaced at the next lease; those who were using it get SandboxGone. Leases of a shared sandbox are one
user in it: they have a scratch folder each, but no wall keeps one out of another's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Protocol, TypeAlias, runtime_checkable

from agentloop.errors import SandboxGone
from agentloop.protocols import Sandbox, SandboxBackend
from agentloop.sandbox.lease import Lease, SharedSandbox
from agentloop.sandbox.socket_folder import sweep_socket_folders
from agentloop.sandbox.stock import MIN_IDLE, Stock
from agentloop.types import SandboxSpec

Sharing: TypeAlias = asyncio.Task[SharedSandbox | None]
"""The making of a sandbox for a spec; None when the backend's sandboxes cannot be shared."""
MAX_SANDBOXES = 8 * (os.cpu_count() or 1)
"""Leases of sandboxes of their own at once; further ones wait."""
MAX_STARTS = 2 * (os.cpu_count() or 1)
"""Sandboxes that are being made at once; more only make each other late."""


@runtime_checkable
class KnowsLeases(Protocol):
    """A sandbox that is told whose it is, as one that keeps a journal must be."""

    def leased(self, lease: str) -> AbstractContextManager[None]:
        """For the length of the block it is `lease`'s."""
        ...


class SandboxPool:
    """Sandboxes of one backend. Close it, or leave sandboxes to die with this process."""

    def __init__(self, backend: SandboxBackend, *, min_idle: int = MIN_IDLE) -> None:
        """Also removes what processes that were killed left in the folder for temporary files.

        min_idle: sandboxes kept ready of a spec that was leased; 0 makes each when it is asked for.
        """
        sweep_socket_folders()
        self.backend = backend
        self._shared: dict[SandboxSpec, Sharing] = {}
        self._stock = Stock(self._create, self._end, min_idle)
        self._creating: set[asyncio.Task[Sandbox]] = set()
        self._sandboxes: dict[str, Sandbox] = {}
        self._own = asyncio.Semaphore(MAX_SANDBOXES)
        self._starts = asyncio.Semaphore(MAX_STARTS)
        self._closed = False

    @property
    def isolation(self) -> str:
        """What its sandboxes are made of; recorded on every trace."""
        return self.backend.isolation

    @property
    def max_sandboxes(self) -> int:
        """Leases of sandboxes that are not shared, at once; further ones wait."""
        return MAX_SANDBOXES

    @asynccontextmanager
    async def lease(self, spec: SandboxSpec, lease_id: str) -> AsyncIterator[Sandbox]:
        """A sandbox as `spec` says, for one episode; what the episode wrote is discarded afterwards.

        Raises SandboxGone when the pool is or gets closed, and what the backend's `create` raises.
        """
        shared = await self._shared_sandbox(spec) if spec.read_only else None
        if shared is not None:
            lease = Lease(shared, lease_id)
            try:
                with _lease_of(shared, lease_id):
                    yield lease
            finally:
                await lease.close()
        else:
            async with self._own:
                sandbox = await self._stock.take(spec)
                try:
                    with _lease_of(sandbox, lease_id):
                        yield sandbox
                finally:
                    await self._end(sandbox)

    async def renew(self) -> None:
        """End the shared sandboxes, so that the next lease starts from nothing. For when none is leased.

        Leases of a shared sandbox have scratch folders of their own, but what a command writes elsewhere
        in /tmp stays while the sandbox does.
        """
        shared = list(self._shared.values())
        self._shared = {}
        for sandbox in [_result(task) for task in shared if task.done()]:
            if sandbox:
                await self._end(sandbox)

    async def close(self) -> None:
        """End every sandbox, leased ones and those that are still being created too."""
        self._closed = True
        await self._stock.close()
        creating = list(self._creating)
        for task in creating:
            task.cancel()
        await asyncio.gather(*creating, return_exceptions=True)
        await asyncio.gather(*(self._end(sandbox) for sandbox in list(self._sandboxes.values())))

    async def _shared_sandbox(self, spec: SandboxSpec) -> SharedSandbox | None:
        """The one sandbox for `spec`; None when this backend's sandboxes cannot be shared."""
        task = self._shared.get(spec)
        if task is None or _is_useless(task):
            task = self._shared[spec] = asyncio.ensure_future(self._create_shared(spec, task))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, should nobody be waiting
        return await asyncio.shield(task)

    async def _create_shared(self, spec: SandboxSpec, before: Sharing | None) -> SharedSandbox | None:
        dead = _result(before) if before else None
        if dead:
            await self._end(dead)
        sandbox = await self._create(spec)
        if isinstance(sandbox, SharedSandbox):
            return sandbox
        await self._end(sandbox)
        return None

    async def _create(self, spec: SandboxSpec) -> Sandbox:
        if self._closed:
            raise SandboxGone("the sandbox pool is closed")
        task = asyncio.ensure_future(self._created(spec))
        self._creating.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if task.done() and not task.cancelled() and task.exception() is None:
                await self._end(task.result())
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise SandboxGone("the sandbox pool was closed while the sandbox was being created") from None
        finally:
            self._creating.discard(task)

    async def _created(self, spec: SandboxSpec) -> Sandbox:
        async with self._starts:
            sandbox = await self.backend.create(spec)
            self._sandboxes[sandbox.id] = sandbox
            return sandbox

    async def _end(self, sandbox: Sandbox) -> None:
        self._sandboxes.pop(sandbox.id, None)
        await sandbox.close()


def _lease_of(sandbox: object, lease_id: str) -> AbstractContextManager[None]:
    return sandbox.leased(lease_id) if isinstance(sandbox, KnowsLeases) else nullcontext()


def _is_useless(task: Sharing) -> bool:
    """True when it failed to make a sandbox, or the sandbox it made is gone."""
    if not task.done():
        return False
    sandbox = _result(task)
    return sandbox.gone if sandbox else task.cancelled() or task.exception() is not None


def _result(task: Sharing) -> SharedSandbox | None:
    """The sandbox that a finished task made; None when it made none."""
    return None if task.cancelled() or task.exception() is not None else task.result()
