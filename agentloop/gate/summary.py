"""A fold that has ended -> GateResult: the lines of the tasks, the figures, and the sentences. Decides nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from agentloop.errors import counted
from agentloop.gate.estimators import estimates
from agentloop.gate.findings import drop, named, never_passed, points
from agentloop.gate.outcomes import GateResult, GateVerdict, Outcome, Side, SuiteResult, TaskLine
from agentloop.types import RewardState

if TYPE_CHECKING:
    from agentloop.gate.fold import Fold, SuiteState

ENDS = "The outcomes end at"
"""What begins the reason that a live gate, which knows why it stopped, leaves out."""
Trials = dict[str, dict[Side, list[Outcome]]]


def summarise(fold: Fold) -> GateResult:
    """Needs a verdict: raises ValueError for a fold that is undecided."""
    if fold.decided is None:
        raise ValueError("the gate is undecided; close the fold first")
    trials = _trials(fold)
    lines = tuple(_lines(fold, trials))
    shown = [one for sides in trials.values() for rows in sides.values() for one in rows]
    return GateResult(
        verdict=fold.decided,
        reasons=tuple(_reasons(fold, lines)),
        baseline=fold.header.baseline,
        candidate=fold.header.candidate,
        settings=fold.header.settings,
        suites=tuple(_suite(fold, suite, lines) for suite in fold.suites),
        tasks=lines,
        n_rollouts=fold.n_rollouts,
        n_candidate=len(fold.used),
        n_fresh=fold.n_fresh,
        n_played=sum(one.played for one in shown if one.policy is Side.candidate),
        n_lost=fold.n_lost,
        n_duplicates=fold.n_duplicates,
        n_missing=fold.n_missing,
        cost_usd=_cost(fold),
        pass_at_k={side.value: _rates(trials, side) for side in Side},
    )


def _trials(fold: Fold) -> Trials:
    """Task -> side -> its trials by number: the baseline's, and those of the candidate's that have had their turn."""
    kept: dict[tuple[str, Side, int], Outcome] = {}
    once = {task for part in fold.header.suites for task in part.quarantined}
    for one in fold.outcomes:
        key = (one.task_id, one.policy, one.trial)
        counts = one.policy is Side.baseline or one.task_id in once or (one.task_id, one.trial) in fold.turns
        if counts and (key not in kept or (kept[key].reward is None and one.reward is not None)):
            kept[key] = one
    found: Trials = {}
    for (task, side, _), one in sorted(kept.items()):
        found.setdefault(task, {Side.baseline: [], Side.candidate: []})[side].append(one)
    return found


def _rewards(rows: list[Outcome]) -> tuple[float, ...]:
    return tuple(one.reward for one in rows if one.reward is not None)


def _rates(trials: Trials, side: Side) -> dict[str, tuple[float, float, float]]:
    return estimates({task: _rewards(sides[side]) for task, sides in trials.items()})


def _cost(fold: Fold) -> float | None:
    """Of all that was rolled out, retries and what came too late to count included; None where any is unknown."""
    n_bank = fold.header.bank_trials or 0
    costs = [one.cost_usd for one in fold.outcomes if one.policy is Side.candidate or one.trial >= n_bank]
    known = [cost for cost in costs if cost is not None]
    return math.fsum(known) if known and len(known) == len(costs) else None


def _lines(fold: Fold, trials: Trials) -> Iterator[TaskLine]:
    nothing: dict[Side, list[Outcome]] = {Side.baseline: [], Side.candidate: []}
    for suite in fold.suites:
        part = suite.part
        groups: tuple[tuple[Literal["mean", "must_pass", "quarantined"], tuple[str, ...]], ...] = (
            ("must_pass", part.must_pass),
            ("mean", part.tasks),
            ("quarantined", part.quarantined),
        )
        for kind, tasks in groups:
            for task in tasks:
                sides, case = trials.get(task, nothing), suite.cases.get(task)
                mine = sides[Side.candidate]
                failed = [one for one in mine if one.failure is not None]
                yield TaskLine(
                    task_id=task,
                    suite=part.name,
                    baseline=_rewards(sides[Side.baseline]),
                    candidate=_rewards(mine),
                    n_lost=sum(one.state is not RewardState.scored for one in mine),
                    kind=kind,
                    e_value=None if case is None else case.log_e / math.log(10),
                    broken=case is not None and case.broken,
                    trace_ids=tuple(one.trace_id for one in mine if one.trace_id),
                    baseline_trace_ids=tuple(one.trace_id for one in sides[Side.baseline] if one.trace_id),
                    failures=tuple(one.failure for one in failed if one.failure),
                    why=next((one.why for one in mine if one.why and (one.reward is None or one.reward < 1)), None),
                )


def _suite(fold: Fold, suite: SuiteState, lines: Sequence[TaskLine]) -> SuiteResult:
    if suite.failed and fold.may_claim:
        verdict = GateVerdict.failed
    elif suite.passed and fold.may_claim and (suite.part.tasks or suite.part.must_pass):
        verdict = GateVerdict.passed
    else:
        verdict = GateVerdict.inconclusive if fold.may_claim else GateVerdict.infra
    return SuiteResult(
        name=suite.part.name,
        hash=suite.part.hash,
        verdict=verdict,
        alpha=suite.alpha,
        looks=tuple(suite.looks),
        n_visits=suite.bets.n,
        n_cases=len(suite.cases),
        n_broken=sum(case.broken for case in suite.cases.values()),
        reason=" ".join(_of_suite(fold, suite, lines)),
    )


def _of_suite(fold: Fold, suite: SuiteState, lines: Sequence[TaskLine]) -> Iterator[str]:
    settings = fold.header.settings
    broken = [task for task, case in suite.cases.items() if case.broken]
    unsure = [task for task, case in suite.cases.items() if not case.broken and not case.cleared]
    if broken:
        allowed = f"{settings.reliability * 100:g}% allows"
        yield f"{counted(len(broken), 'must-pass case')} ({named(broken)}) broken: failed more often than {allowed}."
    if unsure:
        advice = never_passed(line for line in lines if line.task_id in unsure)
        undecided = f"{len(unsure)} of {counted(len(suite.cases), 'must-pass case')} undecided ({named(unsure)})"
        yield f"{undecided}{'; ' if advice else ''}{advice}."
    elif not broken and suite.cases:
        yield f"All {counted(len(suite.cases), 'must-pass case')} passed."
    if not suite.part.tasks:
        return
    bets = suite.bets
    seen = f"{points(bets.mean)} points after {counted(bets.n, 'visit')}"
    if bets.interval is not None and bets.n:
        seen += f", 95% confidence sequence {points(bets.interval.low)} to {points(bets.interval.high)}"
    if suite.crossed is GateVerdict.failed:
        shown = f"evidence {_odds(bets.log_fail)}, and {_odds(suite.log_fail)} shows it"
        yield f"The mean reward has dropped: {seen}; {shown}."
    elif suite.crossed is GateVerdict.passed:
        yield (
            f"No drop of {drop(settings)} or more: {seen}; "
            f"evidence {_odds(bets.log_pass)}, and {_odds(suite.log_pass)} shows it."
        )
    else:
        yield f"Neither a drop nor its absence is shown: {seen}."
        if (n := _needed(suite)) and not _used_up(fold):
            yield f"About {counted(n, 'visit')} more would show one, were differences to stay as they are."


def _odds(log_e: float) -> str:
    return f"{math.exp(log_e):,.0f} : 1" if log_e < 14 else f"1e{log_e / math.log(10):.0f} : 1"


def _needed(suite: SuiteState) -> int:
    """How many visits more would do, were the mean and the spread what they are now; 0 where nobody knows."""
    bets = suite.bets
    if not bets.n:
        return 0
    gap = max(bets.mean + bets.delta, -bets.mean)
    short = suite.log_pass - bets.log_pass if gap > -bets.mean else suite.log_fail - bets.log_fail
    n = math.ceil(2 * bets.mean_square * max(short, 0.0) / gap**2)
    return max(n, 1)


def _used_up(fold: Fold) -> str:
    """That the bank ended it, and how large a one would do; empty where something else did."""
    stop = fold.stopped_at
    if stop is None or fold.n_fresh or not fold.header.bank_trials or fold.fresh_trial(stop) is None:
        return ""
    suite = fold.suites[stop.suite]
    more, n = _needed(suite), suite.bets.n
    if not more:
        return "The bank is used up: fill a larger one with --trials."
    n_trials = math.ceil(fold.header.bank_trials * (n + more) / n)  # as many a visit as until here
    return (
        f"The bank is used up before either is shown, and about {counted(more, 'visit')} more would show one: "
        f"fill a bank with --trials {n_trials}, or raise --delta."
    )


def _first_lost(fold: Fold) -> str:
    why = next((one.why for one in fold.outcomes if one.reward is None and one.why), None)
    return f"; of the first it is said: {why.rstrip('.')}" if why else ""


def _reasons(fold: Fold, lines: Sequence[TaskLine]) -> Iterator[str]:
    several = len(fold.suites) > 1
    settings = fold.header.settings
    lost, verdict = fold.n_lost + fold.n_missing, fold.decided
    if verdict is GateVerdict.infra:
        if lost:
            yield (
                f"Nothing is claimed: {lost} of {counted(fold.n_asked, 'candidate trial')} have no outcome "
                f"({fold.n_lost} lost, {fold.n_missing} missing), more than the {settings.max_infra * 100:g}% allowed"
                f"{_first_lost(fold)}. Mend what failed and run the gate again."
            )
        else:
            yield "Nothing is claimed: every trial of one side was lost. Mend what failed and run it again."
    elif verdict is GateVerdict.inconclusive and fold.n_rollouts >= settings.max_rollouts:
        yield f"The gate is out of rollouts: {fold.n_rollouts} of {settings.max_rollouts}."
    elif verdict is GateVerdict.inconclusive:
        yield _used_up(fold) or "The trials end before the gate is decided."
    for suite in sorted(fold.suites, key=lambda one: not one.failed):
        text = " ".join(_of_suite(fold, suite, lines))
        if text:
            yield f"{suite.part.name}: {text}" if several else text
    if fold.n_unpaired:
        yield f"{counted(fold.n_unpaired, 'candidate trial')} found no baseline left to compare with; none decides."
    if lost and verdict is not GateVerdict.infra:
        lacking = f"{fold.n_lost} were lost and {fold.n_missing} are missing"
        yield f"Of {counted(fold.n_asked, 'candidate trial')} {lacking}; none of them is scored."
    if fold.n_duplicates:
        differing = f"; in {fold.n_conflicts} the reward differs" if fold.n_conflicts else ""
        yield f"{counted(fold.n_duplicates, 'outcome')} came more than once and the first counts{differing}."
    yield from fold.notes
    if (stop := fold.stopped_at) is not None and verdict is GateVerdict.inconclusive:
        yield (
            f"{ENDS} task {stop.task_id!r}, trial {stop.trial}, which has none; what is there of later "
            "visits does not count, for it may be the quick ones of those under way."
        )
