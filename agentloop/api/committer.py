"""Many requests, one commit: what arrives while a commit is under way goes into the next one.

A request is answered after its own rows are on disk. What waits is bounded, so that a store that
is slower than its clients makes them slow down instead of filling the memory.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from agentloop.errors import StoreError
from agentloop.store.keys import Spent
from agentloop.types import Span

MAX_WAITING = 96 << 20
"""Bytes of bodies that may wait for a commit."""
MAX_COMMIT = 2048
"""Spans in one transaction, unless one request has more."""

Put = Callable[[str, Sequence[Span], Mapping[str, Spent]], None]


NOTHING: Mapping[str, Spent] = MappingProxyType({})


class Busy(StoreError):
    """429: too much waits already."""


class _Batch(NamedTuple):
    project: str
    spans: Sequence[Span]
    n_bytes: int
    spent: Mapping[str, Spent]
    done: asyncio.Future[None]
    loop: asyncio.AbstractEventLoop


class Committer:
    """One thread that writes; `put` from any event loop."""

    def __init__(self, put: Put) -> None:
        """put: writes spans of one project, and what keys have spent, in one transaction."""
        self._put = put
        self._waiting: deque[_Batch] = deque()
        self._n_bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self.n_commits = 0
        self._thread = threading.Thread(target=self._run, name="committer", daemon=True)
        self._thread.start()

    @property
    def n_waiting_bytes(self) -> int:
        """Bytes of bodies that wait."""
        return self._n_bytes

    async def put(
        self, project: str, spans: Sequence[Span], n_bytes: int, spent: Mapping[str, Spent] = NOTHING
    ) -> None:
        """Return once they are on disk. Raises Busy, StoreError and whatever the write raised."""
        if not spans:
            return
        loop = asyncio.get_running_loop()
        batch = _Batch(project, spans, n_bytes, spent, loop.create_future(), loop)
        with self._changed:
            if self._closed:
                raise StoreError("the server is ending; send it again")
            if self._n_bytes + n_bytes > MAX_WAITING:
                raise Busy(f"{self._n_bytes >> 20} MiB wait for the store")
            self._waiting.append(batch)
            self._n_bytes += n_bytes
            self._changed.notify()
        # A client that goes away does not take its spans back: they may be in a transaction already.
        await asyncio.shield(batch.done)

    def close(self) -> None:
        """Write what waits, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while batches := self._take():
            for project in dict.fromkeys(batch.project for batch in batches):
                self._commit([batch for batch in batches if batch.project == project])

    def _take(self) -> list[_Batch]:
        """Everything that waits, up to MAX_COMMIT; nothing once it is closed and empty."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            batches: list[_Batch] = []
            n_spans = 0
            while self._waiting and (not batches or n_spans + len(self._waiting[0].spans) <= MAX_COMMIT):
                batches.append(self._waiting.popleft())
                n_spans += len(batches[-1].spans)
            return batches

    def _commit(self, batches: list[_Batch]) -> None:
        try:
            self._put(batches[0].project, [span for batch in batches for span in batch.spans], _total(batches))
            problem: Exception | None = None
        except Exception as error:
            problem = error
        self.n_commits += 1
        if problem and len(batches) > 1 and not isinstance(problem, StoreError):
            for batch in batches:  # one of them has what the store cannot take: the others need not suffer
                self._commit([batch])
            return
        with self._changed:
            self._n_bytes -= sum(batch.n_bytes for batch in batches)
        for batch in batches:
            try:
                batch.loop.call_soon_threadsafe(_settle, batch.done, problem)
            except RuntimeError:  # its event loop has ended, and nobody waits there
                continue


def _total(batches: Sequence[_Batch]) -> Mapping[str, Spent]:
    totals: dict[str, Spent] = {}
    for batch in batches:
        for key, (n_calls, n_tokens, cost_usd) in batch.spent.items():
            was = totals.get(key, Spent())
            totals[key] = Spent(was.n_calls + n_calls, was.n_tokens + n_tokens, was.cost_usd + cost_usd)
    return totals


def _settle(done: asyncio.Future[None], problem: Exception | None) -> None:
    if done.done():
        return
    if problem:
        done.set_exception(problem)
    else:
        done.set_result(None)
