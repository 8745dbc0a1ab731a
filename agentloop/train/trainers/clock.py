"""How long a turn has been at work, all its processes together: a kill does not set the clock back.

A file has the times at which processes were at work, up to the last attempts that each noted. A turn that is started
again first goes over what is recorded. Meanwhile its clock stands where it stood when that was made, so that it makes
the same decisions; from the first new attempt on it goes on from the whole sum.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from agentloop.errors import ConfigError
from agentloop.output_files import write_text
from agentloop.types import Attempt

Span: TypeAlias = tuple[float, float]
"""Begin and end, in seconds since 1970."""


class TurnClock:
    """Minutes of work on one turn."""

    def __init__(self, file: Path) -> None:
        """file: what earlier processes of the turn left. Raises ConfigError for a file that is broken."""
        self._file = file
        self._before = _read(file)
        self._started = time.time()
        self._replayed_to = 0.0 if self._before else None
        """The end of the latest recorded attempt that was noted; None once a new one was."""

    def note(self, attempts: Iterable[Attempt]) -> None:
        """These attempts have been made, now or by an earlier process."""
        for attempt in attempts:
            if attempt.trace.started_at is None:
                continue
            begin = attempt.trace.started_at.timestamp()
            end = begin + attempt.trace.duration_s
            if end >= self._started:
                self._replayed_to = None
            elif self._replayed_to is not None:
                self._replayed_to = max(self._replayed_to, end)
                self._before.append((begin, end))
        write_text(self._file, json.dumps(list(self._spans())))

    @property
    def minutes(self) -> float:
        """The sum, without times at which nobody worked."""
        until = time.time() if self._replayed_to is None else self._replayed_to
        return sum(max(0.0, min(end, until) - begin) for begin, end in self._spans()) / 60

    def _spans(self) -> Iterator[Span]:
        """Times of work up to now, in order and apart."""
        last: Span | None = None
        for span in sorted([*self._before, (self._started, time.time())]):
            if last is not None and span[0] <= last[1]:
                last = last[0], max(last[1], span[1])
                continue
            if last is not None:
                yield last
            last = span
        if last is not None:
            yield last


def _read(file: Path) -> list[Span]:
    if not file.is_file():
        return []
    try:
        spans: Sequence[Sequence[float]] = json.loads(file.read_bytes())
        return [(float(begin), float(end)) for begin, end in spans]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{file}: no times of work ({error}); remove the file, and the turn's minutes begin anew"
        ) from None
