"""Groups of attempts for a trainer, rolled out while it trains: decides which start, are used, or are too old.

A group is identified by its number in the plan, so that a restarted trainer requests the same groups. Admission: AReaL,
arXiv:2505.24298 §5.1. With `max_lag` 0 and no over-commit, every step waits for exactly its own groups, and a run is as
repeatable as its policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

G = TypeVar("G")


@dataclass(frozen=True)
class Ready(Generic[G]):
    """A group that has ended."""

    number: int
    """Number in the plan, from 0."""
    version: int
    """Number of updates of the group's policy when the group began."""
    group: G


class GroupStream(Generic[G]):
    """Rolls out groups ahead and returns those of each step; steps are requested one at a time, in order.

    A group that ends later than the others of its step is used in a later step, unless that step is more than `max_lag`
    updates ahead of the group: then the group is dropped and counted in `dropped`.
    """

    def __init__(
        self,
        roll: Callable[[int, int], Awaitable[tuple[int, G]]],
        *,
        n_groups: int,
        n_steps: int,
        max_lag: int = 0,
        over_commit: int = 0,
        max_running: int | None = None,
        consumed: Iterable[int] = (),
        dropped: Iterable[int] = (),
    ) -> None:
        """roll(number, version): rolls out a group; returns (version that sampled it, group). That version is older if
        the group was already on disk.

        n_groups: groups of a step. max_lag: updates that a group may be behind when it is trained on. over_commit:
        groups that may be in progress beyond those that the steps need. max_running: maximum groups in progress; None:
        no limit. consumed, dropped: of an interrupted run; `take` continues after its steps.
        """
        self._roll = roll
        self._n_groups = n_groups
        self._n_steps = n_steps
        self._max_lag = max_lag
        self._over_commit = over_commit
        self._max_running = max_running
        self._ready: dict[int, Ready[G]] = {}
        self._running: dict[int, asyncio.Task[Ready[G]]] = {}
        self._started: dict[int, int] = {}
        self.consumed = set(consumed)
        """Numbers of the groups that `take` returned."""
        self.dropped = set(dropped)
        """Numbers of groups that were too old when they ended, or that were still unused after the last step."""
        self._next = 0
        self._oldest = 0
        """Minimum number of updates of a group's policy for the group to be used."""

    async def __aenter__(self) -> GroupStream[G]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel the groups in progress. They count as dropped, like groups that ended and were not used."""
        self.dropped.update(self._running, self._ready)
        self._ready.clear()
        await self._cancel(list(self._running))

    async def take(self, version: int) -> list[Ready[G]]:
        """The groups of the next step, in plan order, chosen from those that have ended. version: updates so far.

        Raises what `roll` raised. Other groups continue in the background after this returns.
        """
        while True:
            await self.drop_before(version - self._max_lag)
            self._admit(version)
            if len(self._ready) >= self._n_groups:
                break
            if not self._running:  # nothing else is allowed: fewer groups are left than a step needs
                break
            await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
            self._collect()
        chosen = [self._ready.pop(number) for number in sorted(self._ready)[: self._n_groups]]
        self.consumed.update(each.number for each in chosen)
        return chosen

    async def drop_before(self, version: int) -> None:
        """Drop groups of policies with fewer than `version` updates, even groups in progress: they only become older.

        Call it before such a policy becomes unavailable. Errors of dropped groups are not raised.
        """
        self._oldest = max(self._oldest, version)
        self._collect()
        late = [number for number in self._running if self._started[number] < self._oldest]
        await self._cancel(late)
        old = [number for number, each in self._ready.items() if each.version < self._oldest]
        for number in old:
            del self._ready[number]
        self.dropped.update(late, old)

    def announce(self, version: int) -> None:
        """Report a published update: groups that start from now on are of `version`."""
        self._collect()
        self._admit(version)

    def _admit(self, version: int) -> None:
        """Start as many groups as AReaL's rule allows, so that a group that starts now ends in time for its step."""
        steps = min(self._max_lag + version + 1, self._n_steps)
        n_most = steps * self._n_groups + self._over_commit
        # Dropped groups do not count, so others replace them.
        while len(self.consumed) + len(self._ready) + len(self._running) < n_most:
            if self._max_running is not None and len(self._running) >= self._max_running:
                return
            # After a restart, groups that were used or dropped are not rolled out again.
            while self._next in self.consumed or self._next in self.dropped:
                self._next += 1
            number = self._next
            self._next += 1
            self._started[number] = version
            self._running[number] = asyncio.create_task(self._one(number, version))

    async def _one(self, number: int, version: int) -> Ready[G]:
        sampled_by, group = await self._roll(number, version)
        return Ready(number, sampled_by, group)

    def _collect(self) -> None:
        for number in [number for number, task in self._running.items() if task.done()]:
            task = self._running.pop(number)
            if task.exception() is not None and self._started[number] < self._oldest:
                self.dropped.add(number)  # the group would not have been used
            else:
                self._ready[number] = task.result()

    async def _cancel(self, numbers: list[int]) -> None:
        tasks = [self._running.pop(number) for number in numbers]
        for task in tasks:
            task.cancel()
        # Awaited, so that no request is left when the policy of these groups is removed.
        await asyncio.gather(*tasks, return_exceptions=True)
