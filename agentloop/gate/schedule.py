"""Header -> the order of visits, and what a live gate is to roll out next.

The order is a function of the seed, the suites' hashes and the task ids alone: never of a candidate's outcome, and of
the bank's only where `importance` is asked for. Random draws are hashes, so they are the same on every machine and in
every version of Python. Rolls out nothing (`live.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate, islice
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

from agentloop.gate.eprocess import MAX_RUNS
from agentloop.gate.outcomes import Header, Settings, Side, SuitePart

if TYPE_CHECKING:
    from agentloop.gate.fold import Fold

SPACE = 2**64


class Visit(NamedTuple):
    """One look at one task whose mean is compared."""

    suite: int
    """Index into the header's."""
    task_id: str
    trial: int
    """The candidate's."""
    number: int = 0
    """Its place in the order, from 0."""


class Trial(NamedTuple):
    """What is to be rolled out."""

    task_id: str
    policy: Side
    trial: int


def draw(*words: object) -> int:
    """A number in [0, 2^64) that is the same for the same words."""
    return int.from_bytes(blake2b("\x1f".join(map(str, words)).encode(), digest_size=8).digest(), "big")


def shuffled(tasks: Sequence[str], *words: object) -> list[str]:
    """By their hashes: an order that no listing order changes."""
    return sorted(tasks, key=lambda task: (draw(*words, task), task))


def chances(rewards: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Task -> probability of a visit: half even, half by the spread of these rewards, which nothing else uses.

    Sums to 1, and each is at least half of the even share, so that a weight 1 / (N chance) is at most 2.
    """
    likely = {task: (sum(seen) + 0.5) / (len(seen) + 1) for task, seen in rewards.items()}
    spread = {task: sqrt(p * (1 - p)) for task, p in likely.items()}
    total = sum(spread.values())
    return {task: 0.5 / len(spread) + 0.5 * one / total for task, one in spread.items()}


def tasks_in_order(part: SuitePart, settings: Settings, weights: Mapping[str, float]) -> Iterator[str]:
    """The tasks of one suite whose mean is compared, without end; nothing where there are none.

    weights: `chances`, of use to `importance` alone.
    """
    words = (settings.seed, part.hash)
    tasks = sorted(part.tasks)
    edges = list(accumulate(weights[task] for task in tasks)) if settings.sampling == "importance" else []
    turn = 0
    while tasks:
        if settings.sampling == "round-robin":
            yield from shuffled(tasks, *words, turn)
        elif settings.sampling == "iid":
            yield tasks[draw(*words, turn) % len(tasks)]
        else:
            yield tasks[min(bisect_right(edges, draw(*words, turn) / SPACE), len(tasks) - 1)]
        turn += 1


def visits(header: Header, weights: Sequence[Mapping[str, float]]) -> Iterator[Visit]:
    """All suites in turn, without end. weights: one Mapping a suite, see `tasks_in_order`."""
    seen: dict[str, int] = {}
    streams = [
        (suite, tasks_in_order(part, header.settings, weights[suite]))
        for suite, part in enumerate(header.suites)
        if part.tasks
    ]
    number = 0
    while streams:
        for suite, stream in streams:
            task = next(stream)
            trial = seen.get(task, 0)
            seen[task] = trial + 1
            yield Visit(suite, task, trial, number)
            number += 1


class Asking:
    """What a live gate is to roll out next: must-pass cases and their retries, quarantined tasks, then visits.

    Looks at outcomes for three things alone: whether a must-pass case has to be run again, which depends on that case
    only, which suites are decided, and whether the bank was given up, from which on each visit needs a fresh baseline
    attempt. Trials that the fold has a reward of are not asked for again, so a run that was interrupted goes on. The
    fold must have the bank already.
    """

    def __init__(self, fold: Fold) -> None:
        self._fold = fold
        self._cases = {task: fold.new_case(suite, task) for suite, task in fold.must_pass()}
        self._runs = dict.fromkeys(self._cases, 0)
        self._ready = dict.fromkeys(self._cases, True)
        self._once = iter([task for part in fold.header.suites for task in part.quarantined])
        self._asked = {Trial(task, Side.candidate, trial) for task, trial in fold.turns}
        self._n = fold.n_rollouts
        self._turn_back()

    def next(self) -> tuple[Trial, ...]:
        """One trial, or a candidate's and the baseline's beside it in random order; () when there is none for now.

        After () there may be one again as soon as an outcome has come in, while any is under way.
        """
        while self._fold.decided is None and self._n < self._fold.header.settings.max_rollouts:
            asked = self._case() or self._quarantined() or self._visit()
            if not asked:
                break
            new = [trial for trial in asked if trial not in self._asked]
            self._n += len(new)
            self._asked.update(new)
            missing = tuple(trial for trial in new if not self._fold.has_reward(trial))
            if missing:
                return missing
        return ()

    def _turn_back(self) -> None:
        """To the visit that the fold is at: visits ahead of it may need a baseline attempt now that they did not."""
        self._is_paired = self._fold.reference.is_paired
        self._visits = islice(self._fold.visits(), self._fold.n_visits, None)

    def _case(self) -> tuple[Trial, ...]:
        for task, run in self._runs.items():
            if self._is_due(task):
                self._runs[task], self._ready[task] = run + 1, False
                return (Trial(task, Side.candidate, run),)
        return ()

    def _is_due(self, task: str) -> bool:
        """Its first run, or another after one that left the case open."""
        run, case = self._runs[task], self._cases[task]
        if not self._ready[task]:
            tried = self._fold.tried(task, run - 1)
            if tried is None:
                return False
            case.take(tried.reward, lost=tried.is_lost)
            self._ready[task] = True
        return run < MAX_RUNS and not case.broken and not case.cleared

    def _quarantined(self) -> tuple[Trial, ...]:
        return tuple(Trial(task, Side.candidate, 0) for task in islice(self._once, 1))

    def _visit(self) -> tuple[Trial, ...]:
        if self._fold.reference.is_paired != self._is_paired:
            self._turn_back()
        for visit in self._visits:
            if self._fold.takes(visit.suite):
                fresh = self._fold.fresh_trial(visit)
                mine = Trial(visit.task_id, Side.candidate, visit.trial)
                return (mine,) if fresh is None else self._pair(mine, Trial(visit.task_id, Side.baseline, fresh))
            if not any(self._fold.takes(suite) for suite in range(len(self._fold.header.suites))):
                break
        return ()

    def _pair(self, mine: Trial, theirs: Trial) -> tuple[Trial, ...]:
        """In random order, so that neither side is always the later one."""
        return (theirs, mine) if draw(self._fold.header.settings.seed, *mine) % 2 else (mine, theirs)
