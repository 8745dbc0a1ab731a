"""Failures that are alike: one type, found by one detector, at one tool's call, with words that differ in details.

Nothing is learned and nothing is random: who asks why two traces are together is shown the template. What has a
template for itself alone is put together with the others of its type, detector and tool, as `OWN_WORDS`.
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
"""Ids that are kept of a cluster."""


class Kind(NamedTuple):
    """Only failures of one kind are compared."""

    type: str
    detector: str
    """Without its version."""
    tool: str | None


@dataclass
class Tally:
    """Traces that failed alike, counted as they come."""

    n: int = 0
    tasks: set[str] = field(default_factory=set)
    versions: Counter[int | None] = field(default_factory=Counter)
    types: Counter[str] = field(default_factory=Counter)
    traces: list[str] = field(default_factory=list)
    """The first of them."""
    best: dict[str, tuple[tuple[int, bool, int, int], FailureLabel]] = field(default_factory=dict)
    """Type -> what stands for all of it: of those that say something the one of fewest steps that was stored first."""

    def add(self, row: FailureLabel, rank: int = 0) -> None:
        """One more trace. rank: lower ones stand for the others."""
        self.n += 1
        self.versions[row.version] += 1
        self.types[row.type] += 1
        if row.task is not None:
            self.tasks.add(row.task)
        if len(self.traces) < MAX_TRACES:
            self.traces.append(row.id)
        self._show((rank, not row.evidence.strip(), row.n_steps, row.key), row)

    def merge(self, other: Tally) -> None:
        """All of another's traces as well."""
        self.n += other.n
        self.versions.update(other.versions)
        self.types.update(other.types)
        self.tasks |= other.tasks
        self.traces = (self.traces + other.traces)[:MAX_TRACES]
        for order, row in other.best.values():
            self._show(order, row)

    @property
    def mostly(self) -> str:
        """The commonest type."""
        return min(self.types, key=lambda kind: (-self.types[kind], kind))

    @property
    def example(self) -> FailureLabel:
        """Stands for all; it is of the commonest type."""
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
        """The same for the same kind and template."""
        return blake2b(repr((*self.kind, self.template)).encode(), digest_size=4).hexdigest()


class Clusters:
    """Fed one label after another; only the tallies are in memory."""

    def __init__(self, rank: Callable[[FailureLabel], int] = lambda _: 0) -> None:
        self._rank = rank
        self._templates = Templates()
        self._tallies: dict[tuple[Kind, int], Tally] = {}
        self._last: dict[tuple[Kind, int], int] = {}

    def add(self, row: FailureLabel) -> None:
        """A trace is counted once in a cluster, however many labels it has there; they come one after another."""
        kind = Kind(row.type, row.detector.partition("@")[0], row.tool)
        place = (kind, self._templates.add(kind, row.evidence))
        if self._last.get(place) != row.key:
            self._last[place] = row.key
            self._tallies.setdefault(place, Tally()).add(row, self._rank(row))

    def done(self) -> list[Alike]:
        """The largest first."""
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
