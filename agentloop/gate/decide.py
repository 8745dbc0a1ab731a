"""EvalReport x EvalReport -> Decision: is the candidate proven better than the version that is live?

A fixed-size paired test. Both versions did the same tasks, so each task is its own control; the
p-value is that of the exact sign-flip permutation test, which assumes nothing about the shape of
rewards. A candidate that lost attempts to infrastructure must show each claim twice: with the later
results of those episodes, and with these episodes counted against the claim. So losing an attempt is
never better for a candidate than failing it.

Pure functions of stored outcomes: the same reports give the same decision. `decide` is the only
place where an Action is chosen, which is the seam for a sequential gate; nothing here rolls out an
episode or moves a version.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from datetime import datetime
from statistics import fmean

from agentloop.errors import ConfigError, counted
from agentloop.intervals import Z95, wilson
from agentloop.types import Action, Decision, EvalReport, Frozen

GRID = 240
"""Steps of a reward difference of 1: task means of 1-6, 8, 10, 12, 15 or 16 all-or-nothing trials fall on it."""
MAX_INFRA = 0.1
"""Share of episodes lost to infrastructure above which nothing is claimed."""


class Success(Frozen):
    """How often a policy version succeeds, over the tasks of one report."""

    mean: float
    ci95: tuple[float, float]
    n_tasks: int


def success(report: EvalReport) -> Success:
    """Mean over tasks of the task's mean reward, with a 95% interval over tasks.

    The interval is Wilson's at n = number of tasks, however many trials a task had: conservative,
    because a task's mean of rewards in [0, 1] has a variance of at most p(1 - p).
    Raises ValueError when no episode was scored: no success rate is not a success rate of 0.
    """
    means = [fmean(rewards) for rewards in report.rewards.values() if rewards]
    if not means:
        raise ValueError(f"version {report.policy_version} has no scored episode on suite {report.suite!r}")
    mean = fmean(means)
    return Success(mean=mean, ci95=wilson(mean * len(means), len(means)), n_tasks=len(means))


def paired_differences(baseline: EvalReport, candidate: EvalReport) -> dict[str, float]:
    """Task id -> candidate minus baseline mean reward, in [-1, 1], for tasks that both have scored.

    Where a version lost trials to infrastructure, the first trials of both are compared, as many
    as the shorter has: means of unlike numbers of trials would not be exchangeable, and the
    p-value no longer exact.
    """
    differences = {}
    for task in sorted(baseline.rewards.keys() & candidate.rewards.keys()):
        pairs = list(zip(candidate.rewards[task], baseline.rewards[task], strict=False))
        if pairs:
            differences[task] = fmean(c for c, _ in pairs) - fmean(b for _, b in pairs)
    return differences


def charged(report: EvalReport, reward: float) -> EvalReport:
    """`report` with `reward` for each episode that lost an attempt, whatever a later attempt gave.

    These episodes come first, so that none is cut off where the other version has fewer.
    """
    rewards = dict(report.rewards)
    for task, n_lost in report.n_lost.items():
        whole = [one for one, n in zip(report.rewards.get(task, ()), n_lost, strict=False) if not n]
        rewards[task] = (*(reward for n in n_lost if n), *whole)
    return report.model_copy(update={"rewards": rewards})


def sign_flip_p(differences: Sequence[float]) -> float:
    """Exact one-sided p-value: the share of the 2^n sign patterns whose sum is at least the observed one.

    differences: one per task, in [-1, 1], rounded to 1/240; rounding is odd, so a difference and its
    negative stay mirror images and the test stays exact. Returns a value in (0, 1]; 1.0 when all are 0.
    Exact where each task's difference is as likely to have either sign, as it is for two versions that
    behave alike. With one all-or-nothing trial a task it is the exact McNemar test, the sign test on
    the discordant tasks. No sampling, no normal approximation.

    Every sign pattern has its subset of positive sizes, and the sum grows with the subset's. Subsets
    are counted by the product of (1 + x^size), held in one integer with `width` bits a coefficient.
    Costs next to nothing for whole rewards; for arbitrary partial credit, which fills the grid, time
    grows with n³: 0.1 s for 200 tasks, 10 s for 1000.
    """
    if not all(-1 <= d <= 1 for d in differences):
        raise ValueError(f"a difference of rewards lies outside [-1, 1]: {min(differences)} to {max(differences)}")
    steps = [step for d in differences if (step := round(d * GRID))]
    if not steps:
        return 1.0
    unit = math.gcd(*steps)
    width = len(steps) + 1  # a coefficient is at most 2^n
    subsets = 1
    for step in sorted(steps, key=abs):  # smallest first: the integer stays short for longest
        subsets += subsets << (abs(step) // unit * width)
    observed = sum(step for step in steps if step > 0) // unit
    # The sum of an integer's digits in base 2^width is its remainder by 2^width - 1.
    at_least = (subsets >> (observed * width)) % ((1 << width) - 1)
    return max(at_least / (1 << len(steps)), sys.float_info.min)


def difference_ci95(differences: Sequence[float]) -> tuple[float, float]:
    """Approximate 95% interval of the mean difference, within [-1, 1]; no tasks give (-1, 1).

    The normal interval after two made-up tasks that differ by 1/2 of a success each way, which keeps
    it from collapsing to a point when every task agrees. For one all-or-nothing trial a task it is
    Agresti and Min's interval (half a task added to each of the four cells). It describes; the
    decision rests on the exact p-values, and near the edge the two may disagree.
    Source: Agresti & Min, Statistics in Medicine 24 (2005) 729-740.
    """
    if not differences:
        return -1.0, 1.0
    n = len(differences) + 2
    mean = math.fsum(differences) / n
    variance = (math.fsum(d * d for d in differences) + 1) / n - mean * mean
    half = Z95 * math.sqrt(variance / n)
    return max(-1.0, mean - half), min(1.0, mean + half)


def decide(
    baseline: EvalReport,
    candidate: EvalReport,
    *,
    alpha: float = 0.05,
    n_min: int = 20,
    max_infra: float = MAX_INFRA,
    now: datetime,
) -> Decision:
    """Promote when better is shown at `alpha`, roll back when worse is shown at `alpha`, else hold.

    Better must also be shown with each episode of which the candidate lost an attempt as a failure, worse with it as a
    success; the p-values are the larger ones of both.
    alpha: in (0, 0.5); the error rate of each of the two claims, for one look at one candidate.
    Looking again as episodes come in, or at many candidates, adds up: this test is for a fixed size.
    n_min: common tasks below which nothing is claimed. max_infra: share of episodes of either version
    that lost an attempt or have no reward, above which nothing is claimed. now: aware UTC, becomes `created_at`.
    Raises ConfigError when the two reports are of different suites, ValueError for a senseless alpha.
    """
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha is {alpha}: must lie between 0 and 0.5")
    _same_suite(baseline, candidate)
    differences = list(paired_differences(baseline, candidate).values())
    p_better, p_worse = sign_flip_p(differences), sign_flip_p([-d for d in differences])
    if candidate.n_lost:
        low, high = _charged_differences(baseline, candidate)
        p_better, p_worse = max(p_better, sign_flip_p(low)), max(p_worse, sign_flip_p([-d for d in high]))
    obstacles = _obstacles(baseline, candidate, len(differences), n_min, max_infra)
    action = Action.hold
    verdict = []
    if not obstacles:
        action = _choose(p_better, p_worse, alpha)
        verdict = [_verdict(action, p_better, p_worse, alpha)]
    return Decision(
        action=action,
        baseline=baseline.policy_version,
        candidate=candidate.policy_version,
        n_tasks=len(differences),
        difference=fmean(differences) if differences else 0.0,
        ci95=difference_ci95(differences),
        p_better=p_better,
        p_worse=p_worse,
        reasons=(
            *obstacles,
            *verdict,
            *_evidence(differences),
            *_charge(baseline, candidate),
            *_left_out(baseline, candidate, len(differences)),
        ),
        created_at=now,
    )


def lost_too_much(report: EvalReport, max_infra: float = MAX_INFRA) -> bool:
    """True when more than the share `max_infra` of a version's episodes lost an attempt or have no reward."""
    n_bad, n = _n_bad(report)
    return n > 0 and n_bad / n > max_infra


def _n_bad(report: EvalReport) -> tuple[int, int]:
    """Episodes that lost an attempt to infrastructure or have no reward, and all episodes."""
    n_again = sum(n > 0 for task, lost in report.n_lost.items() for n in lost[: len(report.rewards.get(task, ()))])
    return report.n_infra + n_again, report.n_infra + sum(map(len, report.rewards.values()))


def _charged_differences(baseline: EvalReport, candidate: EvalReport) -> tuple[list[float], list[float]]:
    """Task differences with the candidate's episodes that lost an attempt as failures, and as successes."""
    low, high = (paired_differences(baseline, charged(candidate, reward)) for reward in (0.0, 1.0))
    return list(low.values()), list(high.values())


def _choose(p_better: float, p_worse: float, alpha: float) -> Action:
    """At most one of the two holds: p_better + p_worse >= 1, since every sign pattern is in one tail."""
    if p_better <= alpha:
        return Action.promote
    if p_worse <= alpha:
        return Action.roll_back
    return Action.hold


def _same_suite(baseline: EvalReport, candidate: EvalReport) -> None:
    if (baseline.suite, baseline.suite_hash) != (candidate.suite, candidate.suite_hash):
        sides = [f"version {r.policy_version} on {r.suite!r} ({r.suite_hash[:12]})" for r in (baseline, candidate)]
        raise ConfigError(f"reports of different suites: {', '.join(sides)}; evaluate both on the same suite again")


def _obstacles(baseline: EvalReport, candidate: EvalReport, n_tasks: int, n_min: int, max_infra: float) -> list[str]:
    """Why nothing may be claimed, whatever the p-values are; empty when a claim may be made."""
    obstacles = []
    for report in (baseline, candidate):
        if lost_too_much(report, max_infra):
            n_bad, n = _n_bad(report)
            obstacles.append(
                f"Nothing is claimed: {n_bad} of {n} episodes of version {report.policy_version} ({n_bad / n:.0%}) "
                f"lost an attempt to the infrastructure or have no reward, more than the {max_infra:.0%} allowed. "
                "Correct the sandbox or the endpoint and evaluate again."
            )
    if n_tasks < n_min:
        obstacles.append(
            f"Nothing is claimed: {n_tasks} tasks were scored under both versions and a decision needs at least "
            f"{n_min}. Evaluate more tasks."
        )
    return obstacles


def _verdict(action: Action, p_better: float, p_worse: float, alpha: float) -> str:
    if action is Action.hold:
        return f"Neither better (p = {p_better:.2g}) nor worse (p = {p_worse:.2g}) is shown at alpha = {alpha:g}."
    claim, gap, p = ("Better", "lead", p_better) if action is Action.promote else ("Worse", "loss", p_worse)
    return (
        f"{claim} is shown: were the versions alike, a {gap} this large would come by chance with p = {p:.2g} "
        f"(alpha = {alpha:g})."
    )


def _evidence(differences: Sequence[float]) -> list[str]:
    if not differences:
        return []
    n_better = sum(round(d * GRID) > 0 for d in differences)
    n_worse = sum(round(d * GRID) < 0 for d in differences)
    if not n_better and not n_worse:
        return [f"All {len(differences)} tasks have the same reward under both versions."]
    low, high = difference_ci95(differences)
    return [
        f"Of {len(differences)} tasks {n_better} got better, {n_worse} got worse and "
        f"{len(differences) - n_better - n_worse} stayed equal: {fmean(differences):+.3f} mean reward "
        f"(95% interval {low:+.3f} to {high:+.3f})."
    ]


def _charge(baseline: EvalReport, candidate: EvalReport) -> list[str]:
    n_lost = sum(n > 0 for lost in candidate.n_lost.values() for n in lost)
    low, high = _charged_differences(baseline, candidate)
    if not n_lost or not low:
        return []
    return [
        f"{counted(n_lost, 'episode')} of version {candidate.policy_version} lost an attempt to the infrastructure: "
        f"{fmean(low):+.3f} mean reward with each as a failure, {fmean(high):+.3f} with each as a success. Better must "
        "hold for the first, worse for the second."
    ]


def _left_out(baseline: EvalReport, candidate: EvalReport, n_tasks: int) -> list[str]:
    scored = {task for report in (baseline, candidate) for task, rewards in report.rewards.items() if rewards}
    n_alone = len(scored) - n_tasks
    if n_alone:
        return [f"{n_alone} tasks were scored under one version only and are left out."]
    return []
