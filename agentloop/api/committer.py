"""Many requests, one commit: requests that arrive during a commit share the next one.

A request is answered after its own rows are on disk. The queue is bounded, so that a slow store slows
its clients down instead of filling the memory.
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
"""Maximum bytes of bodies that wait for a commit."""
MAX_COMMIT = 2048
"""Maximum spans in one transaction, unless a single request has more."""

Put = Callable[[str, Sequence[Span], Mapping[str, Spent]], None]


NOTHING: Mapping[str, Spent] = MappingProxyType({})


class Busy(StoreError):
    """429: the queue is full."""


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
        """put: writes spans of one project and the spending of its keys in one transaction."""
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
        """Bytes of the bodies in the queue."""
        return self._n_bytes

    async def put(
        self, project: str, spans: Sequence[Span], n_bytes: int, spent: Mapping[str, Spent] = NOTHING
    ) -> None:
        """Return once the spans are on disk. Raises Busy, StoreError and any error of the write."""
        if not spans:
            return
        loop = asyncio.get_running_loop()
        batch = _Batch(project, spans, n_bytes, spent, loop.create_future(), loop)
        with self._changed:
            if self._closed:
                raise StoreError("the server is shutting down; retry")
            if self._n_bytes + n_bytes > MAX_WAITING:
                raise Busy(f"{self._n_bytes >> 20} MiB wait for the store; retry later")
            self._waiting.append(batch)
            self._n_bytes += n_bytes
            self._changed.notify()
        # Shielded, because the spans of a client that disconnects may be in a transaction already.
        await asyncio.shield(batch.done)

    def close(self) -> None:
        """Write the queue to the store, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while batches := self._take():
            for project in dict.fromkeys(batch.project for batch in batches):
                self._commit([batch for batch in batches if batch.project == project])

    def _take(self) -> list[_Batch]:
        """The next batches, up to MAX_COMMIT spans; waits for the first one. Empty once closed and drained."""
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
            for batch in batches:  # one batch has rows that the store rejects: the others must not fail with it
                self._commit([batch])
            return
        with self._changed:
            self._n_bytes -= sum(batch.n_bytes for batch in batches)
        for batch in batches:
            try:
                batch.loop.call_soon_threadsafe(_settle, batch.done, problem)
            except RuntimeError:  # its event loop is closed, so no client waits
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
