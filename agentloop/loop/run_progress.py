"""The progress of a loop in the row of its run: written by the process that drives it, shown by its followers."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from agentloop.errors import LeaseLost, StoreError
from agentloop.progress import Progress
from agentloop.store.store import Store
from agentloop.types import UnitState
from agentloop.types.unit import NOTHING

INTERVAL_S = 1.0
"""Minimum seconds between two writes."""
MAX_EVENTS = 200
"""Events that are stored, the newest ones; a follower misses older ones that it has not shown yet."""
LOST = 75
"""Exit code of a process that has lost its unit to another one."""


class RunProgress:
    """See `Progress`. A thread writes it, because training blocks the event loop for minutes.

    The thread also ends the process once the claim of its unit is over, so that the next driver does not wait for it.
    """

    def __init__(self, store: Store, run: int, unit: int, names: Mapping[str, str] = NOTHING) -> None:
        """unit: number of the unit that drives the run. names: words of lines -> their replacements."""
        self._names = names
        self._store = store
        self._run = run
        self._unit = unit
        self._n_done: int | None = store.n_units(run, state=UnitState.done)
        """Units that were done at the start; None once there are more."""
        before = store.run(run).progress
        self._events: list[list[Any]] = before.get("events", [])
        """Finished stages and lines, the oldest first."""
        self._n = before.get("n", 0)
        """Number of events, also of those that were dropped."""
        self._now: list[Any] | None = None
        """The stage under way: its name, total, units done, figures."""
        self._guard = threading.Lock()
        self._is_new = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write_often, name="progress", daemon=True)

    def __enter__(self) -> RunProgress:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        with self._guard:
            self._end()
        # An unreachable store must not hide the error that ended the loop.
        with suppress(StoreError):
            self._write()

    def start(self, stage: str, total: int) -> None:
        """See Progress."""
        with self._guard:
            self._end()
            self._now = [stage, total, 0, {}]
            self._is_new = True

    def advance(self, n: int = 1, **figures: float) -> None:
        """See Progress."""
        with self._guard:
            if self._now is not None:
                self._now[2] += n
                self._now[3] = figures or self._now[3]
                self._is_new = True

    def say(self, line: str) -> None:
        """See Progress."""
        for word, name in self._names.items():
            line = line.replace(word, name)
        with self._guard:
            self._end()
            self._add([line])

    def _end(self) -> None:
        """The stage under way becomes an event."""
        if self._now is not None:
            self._add(self._now)
            self._now = None

    def _add(self, event: list[Any]) -> None:
        self._events = [*self._events, event][-MAX_EVENTS:]
        self._n += 1
        self._is_new = True

    def _write_often(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            try:
                # During a long step of training, only this thread can notice that the claim is lost.
                self._store.check_claims()
                if self._is_new:
                    self._write()
                self._note_units()
            except LeaseLost:
                # sys.exit would end this thread alone, and the main thread would go on with a turn that another driver
                # has.
                os._exit(LOST)
            except StoreError:  # whatever the loop itself writes next says so
                continue

    def _note_units(self) -> None:
        """Clear the count of drivers that died, once this driver has made progress."""
        if self._n_done is not None and self._store.n_units(self._run, state=UnitState.done) > self._n_done:
            self._store.forgive_unit(self._unit)
            self._n_done = None

    def _write(self) -> None:
        with self._guard:
            # `_now` is changed in place and so copied here; `_events` is only ever replaced.
            now = None if self._now is None else list(self._now)
            document = {"events": self._events, "n": self._n, "now": now}
            self._is_new = False
        # The write is outside the guard, which the loop takes for each attempt, so a slow server does not stop the
        # loop.
        self._store.put_progress(self._run, document)


class Shown:
    """Shows the progress of a run as if it ran in this process."""

    def __init__(self, progress: Progress, n: int = 0) -> None:
        """n: number of events that were shown before."""
        self._progress = progress
        self._n = n
        self._stage: list[Any] | None = None
        """The stage under way as it is shown."""

    def show(self, document: Mapping[str, Any]) -> None:
        """Show what is new in the progress of the run."""
        events = document.get("events", [])
        n = document.get("n", 0)
        # The row has only the last MAX_EVENTS, and more than these may be new.
        for event in events[max(0, len(events) - (n - self._n)) :] if n > self._n else ():
            if len(event) == 1:
                self._progress.say(event[0])
            else:
                self._show_stage(event)
            self._stage = None
        self._n = n
        if document.get("now") is not None:
            self._show_stage(document["now"])

    def _show_stage(self, stage: list[Any]) -> None:
        name, total, n_done, figures = stage
        before = self._stage
        if before is None or before[:2] != [name, total] or n_done < before[2]:
            self._progress.start(name, total)
            before = [name, total, 0, {}]
        self._progress.advance(n_done - before[2], **figures)
        self._stage = stage
