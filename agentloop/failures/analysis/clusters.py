"""Groups similar failures: one type, one detector, one tool, and words that differ only in details.

Nothing is learned and nothing is random: the template explains why two traces are in one cluster. Failures whose
template is unique form one cluster for each type, detector and tool, called `OWN_WORDS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from agentloop.failures.analysis.templates import Templates
from agentloop.store.failures import FailureLabel

OWN_WORDS = "(each in its own words)"
MAX_TRACES = 20
"""Maximum number of trace ids to keep for a cluster."""


class Kind(NamedTuple):
    """Only failures of one kind are compared."""

    type: str
    detector: str
    """The detector's name without its version."""
    tool: str | None


@dataclass
class Tally:
    """Running totals of traces that failed alike."""

    n: int = 0
    tasks: set[str] = field(default_factory=set)
    versions: Counter[int | None] = field(default_factory=Counter)
    types: Counter[str] = field(default_factory=Counter)
    traces: list[str] = field(default_factory=list)
    """Ids of the first traces."""
    best: dict[str, tuple[tuple[int, bool, int, int], FailureLabel]] = field(default_factory=dict)
    """Type -> its representative trace: the one with the fewest steps among those with a quote; the oldest of
    equals."""

    def add(self, row: FailureLabel, rank: int = 0) -> None:
        """Adds a trace. rank: a lower rank is preferred as the representative."""
        self.n += 1
        self.versions[row.version] += 1
        self.types[row.type] += 1
        if row.task is not None:
            self.tasks.add(row.task)
        if len(self.traces) < MAX_TRACES:
            self.traces.append(row.id)
        self._show((rank, not row.evidence.strip(), row.n_steps, row.key), row)

    def merge(self, other: Tally) -> None:
        """Adds all traces of another tally."""
        self.n += other.n
        self.versions.update(other.versions)
        self.types.update(other.types)
        self.tasks |= other.tasks
        self.traces = (self.traces + other.traces)[:MAX_TRACES]
        for order, row in other.best.values():
            self._show(order, row)

    @property
    def mostly(self) -> str:
        """The most common type."""
        return min(self.types, key=lambda kind: (-self.types[kind], kind))

    @property
    def example(self) -> FailureLabel:
        """The representative trace of the most common type."""
        return self.best[self.mostly][1]

    def _show(self, order: tuple[int, bool, int, int], row: FailureLabel) -> None:
        if row.type not in self.best or order < self.best[row.type][0]:
            self.best[row.type] = order, row


@dataclass(frozen=True)
class Alike:
    """A cluster."""

    kind: Kind
    template: str
    tally: Tally

    @property
    def id(self) -> str:
        """An id that depends on the kind and the template alone."""
        return blake2b(repr((*self.kind, self.template)).encode(), digest_size=4).hexdigest()


class Clusters:
    """Builds clusters from a stream of labels. Only the tallies are in memory."""

    def __init__(self, rank: Callable[[FailureLabel], int] = lambda _: 0) -> None:
        self._rank = rank
        self._templates = Templates()
        self._tallies: dict[tuple[Kind, int], Tally] = {}
        self._last: dict[tuple[Kind, int], int] = {}

    def add(self, row: FailureLabel) -> None:
        """Adds a label. A trace counts once in a cluster; labels of one trace must arrive together."""
        kind = Kind(row.type, row.detector.partition("@")[0], row.tool)
        place = (kind, self._templates.add(kind, row.evidence))
        if self._last.get(place) != row.key:
            self._last[place] = row.key
            self._tallies.setdefault(place, Tally()).add(row, self._rank(row))

    def done(self) -> list[Alike]:
        """The clusters, largest first."""
        alone: dict[Kind, list[tuple[int, Tally]]] = {}
        clusters = []
        for (kind, number), tally in self._tallies.items():
            if tally.n == 1:
                alone.setdefault(kind, []).append((number, tally))
            else:
                clusters.append(Alike(kind, self._templates.text(number), tally))
        for kind, ones in alone.items():
            if len(ones) == 1:
                clusters.append(Alike(kind, self._templates.text(ones[0][0]), ones[0][1]))
                continue
            together = Tally()
            for _, tally in ones:
                together.merge(tally)
            clusters.append(Alike(kind, OWN_WORDS, together))
        return sorted(
            clusters, key=lambda one: (-one.tally.n, one.template == OWN_WORDS, *map(str, one.kind), one.template)
        )
