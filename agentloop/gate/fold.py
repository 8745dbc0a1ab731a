"""Header, outcomes -> GateResult, one outcome at a time: the gate's decision, and nothing else.

Visits count in their order, whatever order outcomes come in: one whose turn has not come waits in a buffer. Everything
that decides is known before the outcome that it is applied to. Reads no file (`outcomes.py`, `replay.py`), rolls out
nothing (`live.py`), words nothing (`summary.py`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from agentloop.errors import ConfigError, counted
from agentloop.gate.eprocess import MAX_RUNS, Bets, Case, reliability
from agentloop.gate.outcomes import GateResult, GateVerdict, Header, Look, Outcome, Settings, Side, SuitePart
from agentloop.gate.replay import UNKNOWN, FileOrder, arrange
from agentloop.gate.schedule import Asking, Trial, Visit, chances, visits

ALL_LOST = 20
"""First trials that, when every one of them is lost, end the gate: a dead endpoint is no reason to go on asking."""
VISITS = 800
"""That a bank should be good for: to find 5 points takes 413 on average, 730 in one gate of ten (benchmarks/gate.py).
Visits with more banked trials have less noise, but a small suite's bank would be used up before they are enough."""
Key = tuple[str, int]


def banked_a_visit(n_tasks: int, n_banked: int) -> int:
    """Trials of a task's n_banked that one visit takes: a quarter at most, and so few that there are VISITS."""
    return max(1, min(n_banked // 4, n_tasks * n_banked // VISITS))


class SuiteState:
    """One suite while it is being decided."""

    def __init__(self, part: SuitePart, header: Header, *, looks: bool) -> None:
        settings = header.settings
        self.part = part
        self.alpha = settings.alpha * part.weight / sum(one.weight for one in header.suites)
        share = self.alpha / 2 if part.tasks and part.must_pass else self.alpha
        self.log_fail, self.log_pass = math.log(1 / share), math.log(1 / settings.beta)
        self.case_bound = len(part.must_pass) / share
        self.weights: dict[str, float] = {}
        """Chances of the tasks' visits, for importance."""
        self.bets = Bets(settings.delta, bound=2.0 if settings.sampling == "importance" else 1.0, looks=looks)
        self.cases = {task: self.case(settings.reliability) for task in part.must_pass}
        self.looks: list[Look] = []
        self.crossed: GateVerdict | None = None if part.tasks else GateVerdict.passed
        """What the mean's evidence said first; with no tasks there is nothing to say."""
        self.closed = not part.tasks
        """Whether its visits count no more. For good: a live gate does not ask for them from then on."""

    def case(self, reliability: float) -> Case:
        """A new one of this suite."""
        return Case(reliability, self.case_bound)

    @property
    def failed(self) -> bool:
        """A drop is shown, or a case is broken."""
        return self.crossed is GateVerdict.failed or any(case.broken for case in self.cases.values())

    @property
    def passed(self) -> bool:
        """A drop of delta is excluded, and every case cleared."""
        return self.crossed is GateVerdict.passed and all(case.cleared for case in self.cases.values())

    def add(self, difference: float) -> None:
        """The next visit's."""
        self.bets.add(difference)
        bets, interval = self.bets, self.bets.interval
        if interval is not None:
            to_10 = 1 / math.log(10)
            self.looks.append(
                Look(
                    n=bets.n,
                    e_fail=bets.log_fail * to_10,
                    e_pass=bets.log_pass * to_10,
                    mean=bets.mean,
                    low=interval.low,
                    high=interval.high,
                )
            )
        if self.crossed is None:
            if bets.log_fail >= self.log_fail:
                self.crossed = GateVerdict.failed
            elif bets.log_pass >= self.log_pass:
                self.crossed = GateVerdict.passed


class Fold:
    """A gate that is under way.

    header: with its suites and `bank_trials`: baseline trials numbered below it are the bank, and must be added before
    the first candidate's. order: where it is not the schedule's. looks=False leaves out the confidence sequence and the
    path of the evidence, for simulations.
    """

    def __init__(self, header: Header, order: FileOrder | None = None, *, looks: bool = True) -> None:
        self.header, self.order = header, order
        self.notes = order.notes if order else ()
        self.suites = [SuiteState(part, header, looks=looks) for part in header.suites]
        self.decided: GateVerdict | None = None
        """The verdict, from the moment that it stands; outcomes that come later are read and change nothing."""
        self.n_rollouts = self.n_fresh = self.n_lost = self.n_unpaired = 0
        """Of what has had its turn; see GateResult."""
        self.n_missing = self.n_asked = order.n_missing if order else 0
        self.n_duplicates = self.n_conflicts = 0
        self.outcomes: list[Outcome] = []
        """Every one that was added, in the order in which it came."""
        self.stopped_at: Visit | None = None
        """The visit without an outcome that ended what counts."""
        self.turns: set[Key] = set()
        """Candidate trials that have had theirs."""
        self.used: set[Key] = set()
        """Those of them that count."""
        self._kind = _kinds(header)
        self._candidate: dict[Key, Outcome] = {}
        self._baseline: dict[Key, Outcome] = {}
        self._given_up: set[tuple[bool, Key]] = set()
        self._last: dict[str, float] = {UNKNOWN: math.inf}
        """Highest number of a task's candidate trials."""
        self._looks, self._closed, self._started, self._hold = looks, False, False, header.bank_trials or 0

    # ------------------------------------------------------------------------------------ what comes in

    def add(self, outcome: Outcome, *, last: bool = False) -> None:
        """One outcome. last: there will be no further try of this trial, so one without a reward is lost for good.

        Raises ConfigError for a task that the header does not have, and for one that the bank lacks.
        """
        if outcome.task_id not in self._kind:
            raise ConfigError(
                f"an outcome of task {outcome.task_id!r}, which is in none of the header's suites; "
                "gate the suite that the bank was made of"
            )
        self.outcomes.append(outcome)
        mine = outcome.policy is Side.candidate
        rows, key = self._candidate if mine else self._baseline, (outcome.task_id, outcome.trial)
        known = rows.get(key)
        if known is None or known.reward is None:
            if known is None or outcome.reward is not None:
                rows[key] = outcome
        elif outcome.reward is not None:
            self.n_duplicates += 1
            self.n_conflicts += outcome.reward != known.reward
        if last:
            self._given_up.add((mine, key))
        if mine:
            self._last[key[0]] = max(self._last.get(key[0], 0), key[1])
        if self.decided is None and (self._started or mine):
            self._advance()

    def close(self) -> None:
        """No more outcomes: what has no reward by now is lost, and the gate ends with what it has."""
        self._closed = True
        self._advance()
        if self.decided is None:
            self.decided = GateVerdict.infra if self._is_infra() else GateVerdict.inconclusive

    def result(self) -> GateResult:
        """As if no more outcomes came; more may be added afterwards."""
        from agentloop.gate.summary import summarise

        if self.decided is not None:
            return summarise(self)
        ended = Fold(self.header, self.order, looks=self._looks)
        for outcome in self.outcomes:
            ended.add(outcome)
        ended.close()
        return summarise(ended)

    # ------------------------------------------------------------------------------------ what a schedule asks

    def visits(self) -> Iterator[Visit]:
        """All of them, in order."""
        self._start()
        return iter(self.order.visits) if self.order else visits(self.header, [s.weights for s in self.suites])

    def asking(self) -> Asking:
        """What to roll out next; needs the bank."""
        return Asking(self)

    def must_pass(self) -> list[tuple[int, str]]:
        """(suite, task) of each case, in order."""
        return [(i, task) for i, suite in enumerate(self.suites) for task in suite.part.must_pass]

    def new_case(self, suite: int, task: str) -> Case:
        """As the fold makes them; needs the bank."""
        self._start()
        return self.suites[suite].case(self._reliability(task))

    def _reliability(self, task: str) -> float:
        return reliability(self._bank.get(task, ()), self.header.settings.reliability)

    def takes(self, suite: int) -> bool:
        """Whether visits of this suite still count."""
        return not self.suites[suite].closed

    def fresh_trial(self, visit: Visit) -> int | None:
        """Number of the baseline trial to roll out for this visit; None while the bank has enough."""
        beyond = visit.trial - len(self._bank.get(visit.task_id, ())) // self._per_visit
        return None if beyond < 0 else self._hold + beyond

    def final(self, task: str, trial: int) -> Outcome | None:
        """A candidate's outcome, once there will be no other."""
        outcome = self._candidate.get((task, trial))
        is_final = outcome is not None and (outcome.reward is not None or (True, (task, trial)) in self._given_up)
        return outcome if is_final else None

    def has_reward(self, trial: Trial) -> bool:
        """Whether there is nothing left to roll out for it."""
        rows = self._candidate if trial.policy is Side.candidate else self._baseline
        outcome = rows.get((trial.task_id, trial.trial))
        return outcome is not None and outcome.reward is not None

    @property
    def may_claim(self) -> bool:
        """No more was lost than allowed, of what has had its turn."""
        return self.n_lost + self.n_missing <= self.header.settings.max_infra * self.n_asked

    # ------------------------------------------------------------------------------------ whose turn it is

    def _start(self) -> None:
        """From here on the bank is what it is."""
        if self._started:
            return
        self._started = True
        settings = self.header.settings
        rows: dict[str, list[tuple[int, float | None]]] = {}
        for (task, trial), outcome in self._baseline.items():
            if trial < self._hold:
                rows.setdefault(task, []).append((trial, outcome.reward))
        self._bank = {task: [reward for _, reward in sorted(seen) if reward is not None] for task, seen in rows.items()}
        aside = self._hold // 4 if settings.sampling == "importance" else 0
        fewest = min((len(part.tasks) for part in self.header.suites if part.tasks), default=0)
        self._per_visit = settings.per_visit or banked_a_visit(fewest, self._hold - aside)
        _check_bank(self.header, self._bank, self._per_visit)
        for suite in self.suites:
            if settings.sampling == "importance":
                suite.weights = chances({task: self._bank[task][:aside] for task in suite.part.tasks})
                for task in suite.part.tasks:
                    self._bank[task] = self._bank[task][aside:]
        for suite in self.suites:
            suite.cases = {task: suite.case(self._reliability(task)) for task in suite.part.must_pass}
        self._due = deque(self.must_pass())
        self._runs = dict.fromkeys((task for _, task in self._due), 0)
        self._order = self.visits()
        self._visit = next(self._order, None)

    def _advance(self) -> None:
        self._start()
        while self.decided is None and (self._case() if self._due else self._next()):
            self._decide()

    def _turn(self, key: Key) -> tuple[bool, float | None]:
        """(whether its turn can be over, reward) of a candidate's trial, which is counted then."""
        outcome = self._candidate.get(key)
        if outcome is None:
            over = self._closed and self._last.get(key[0], -1) > key[1]
        else:
            over = outcome.reward is not None or self._closed or (True, key) in self._given_up
        if not over:
            return False, None
        return True, outcome.reward if outcome is not None else None

    def _count(self, key: Key) -> None:
        outcome = self._candidate.get(key)
        self.turns.add(key)
        self.n_asked += 1
        self.n_rollouts += outcome is not None
        self.n_missing += outcome is None
        self.n_lost += outcome is not None and outcome.reward is None

    def _case(self) -> bool:
        """The next run of a must-pass case; all first runs, then all second ones that are needed, and so on."""
        suite, task = self._due[0]
        key, case = (task, self._runs[task]), self.suites[suite].cases[task]
        over, reward = self._turn(key)
        if not over and not self._closed:
            return False
        self._due.popleft()
        if not over:  # never run, and will not be: the case stays open
            return True
        self._count(key)
        self._runs[task] += 1
        if reward is not None:
            self.used.add(key)
            case.add(reward >= 1)
        if not case.broken and not case.cleared and self._runs[task] < MAX_RUNS:
            self._due.append((suite, task))
        return True

    def _next(self) -> bool:
        """The next visit of a suite that still takes them."""
        visit = self._visit
        if visit is None or not any(map(self.takes, range(len(self.suites)))):
            return False
        if self.takes(visit.suite):
            key = (visit.task_id, visit.trial)
            over, reward = self._turn(key)
            base, is_fresh = None, False
            if reward is not None:
                paired, base, is_fresh = self._partner(visit)
                over = over and paired
            if not over:
                self.stopped_at = visit if self._closed else None
                return False
            self._count(key)
            if reward is not None:
                self.n_fresh += is_fresh
                self.n_rollouts += is_fresh
                if base is not None:
                    self._settle(visit, reward - base)
                elif is_fresh:
                    self.n_lost += 1
                else:
                    self.n_unpaired += 1
        self._visit = next(self._order, None)
        return True

    def _settle(self, visit: Visit, difference: float) -> None:
        suite = self.suites[visit.suite]
        self.used.add((visit.task_id, visit.trial))
        if suite.weights:
            difference /= len(suite.part.tasks) * suite.weights[visit.task_id]
        suite.add(difference)

    def _partner(self, visit: Visit) -> tuple[bool, float | None, bool]:
        """(whether it is known, mean of the baseline, whether that is one fresh trial) for a visit.

        Told by the visit's number alone, so a lost one leaves its banked trials unused, and with one of them a visit a
        candidate's trial meets the banked one of its own number: what a cassette needs.
        """
        m, bank = self._per_visit, self._bank.get(visit.task_id, [])
        beyond = self.fresh_trial(visit)
        if beyond is None:
            return True, sum(bank[visit.trial * m : (visit.trial + 1) * m]) / m, False
        key = (visit.task_id, beyond)
        outcome = self._baseline.get(key)
        if outcome is None:
            # A gate that rolls out fresh ones had this one under way when it ended: only the quick are in the file.
            is_cut = self.order is None and any(trial >= self._hold for _, trial in self._baseline)
            return self._closed and not is_cut, None, False
        known = outcome.reward is not None or self._closed or (False, key) in self._given_up
        return known, outcome.reward, True

    # ------------------------------------------------------------------------------------ what it comes to

    def _decide(self) -> None:
        settings, lost = self.header.settings, self.n_lost + self.n_missing
        for suite in self.suites:
            suite.closed = suite.closed or (suite.crossed is not None and self.may_claim)
        if self.may_claim and any(suite.failed for suite in self.suites):
            self.decided = GateVerdict.failed
        elif self.may_claim and self._kind and not self._due and all(suite.passed for suite in self.suites):
            self.decided = GateVerdict.passed
        elif lost > settings.max_infra * settings.max_rollouts or (lost == self.n_asked >= ALL_LOST):
            self.decided = GateVerdict.infra
        elif self.n_rollouts >= settings.max_rollouts:
            self.decided = GateVerdict.inconclusive if self.may_claim else GateVerdict.infra

    def _is_infra(self) -> bool:
        """Nothing may be claimed, or there is nothing because all of a side was lost."""
        if not self.may_claim:
            return True
        sides = (self._baseline, self._candidate)
        return any(rows and all(one.reward is None for one in rows.values()) for rows in sides)


def _kinds(header: Header) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in header.suites:
        for kind, tasks in (("mean", part.tasks), ("must_pass", part.must_pass), ("quarantined", part.quarantined)):
            for task in tasks:
                if task in found:
                    raise ConfigError(f"task {task!r} is in this gate twice; give one of them another id")
                found[task] = kind
    return found


def _check_bank(header: Header, bank: dict[str, list[float]], per_visit: int) -> None:
    if not header.bank_trials:
        return
    if per_visit > header.bank_trials:
        raise ConfigError(f"a visit takes {per_visit} banked trials and a task has {header.bank_trials}; ask for fewer")
    lacking = [task for part in header.suites for task in part.tasks if task not in bank]
    if lacking:
        raise ConfigError(
            f"no baseline for {counted(len(lacking), 'task')}, {lacking[0]!r} the first; "
            "a gate never guesses one: fill the bank with the baseline's trials of these tasks"
        )


def fold(
    header: Header | None,
    outcomes: Iterable[Outcome],
    *,
    settings: Settings | None = None,
    must_pass: Sequence[str] = (),
    looks: bool = True,
) -> GateResult:
    """The gate's word on outcomes that are all there; the same for the same outcomes.

    settings, must_pass (patterns of task ids): for outcomes without a header. Raises ConfigError; see `arrange`.
    """
    arranged = arrange(header, list(outcomes), settings or Settings(), must_pass)
    folding = Fold(arranged.header, arranged.order, looks=looks)
    for outcome in arranged.outcomes:
        folding.add(outcome)
    folding.close()
    return folding.result()
