"""The gate's numbers against independent sources: scipy, enumeration of every sign pattern, and hand calculation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reports.example import NOW, eval_report
from scipy.stats import binomtest, norm

from agentloop.errors import ConfigError
from agentloop.gate.decide import GRID, charged, decide, difference_ci95, paired_differences, sign_flip_p, success
from agentloop.intervals import wilson
from agentloop.types import Action, Decision, EvalReport

SWAPPED = {Action.promote: Action.roll_back, Action.roll_back: Action.promote, Action.hold: Action.hold}


def paired(better: int, worse: int, equal: int) -> tuple[EvalReport, EvalReport]:
    """Two reports with one trial a task and so many tasks of each outcome."""
    outcomes = [(0.0, 1.0)] * better + [(1.0, 0.0)] * worse + [(1.0, 1.0)] * equal
    sides = [{f"t{n}": (pair[side],) for n, pair in enumerate(outcomes)} for side in (0, 1)]
    return eval_report(sides[0], 1), eval_report(sides[1], 2)


def by_enumeration(differences: list[float]) -> float:
    steps = [round(d * GRID) for d in differences]
    patterns = [
        sum(sign * abs(step) for sign, step in zip(signs, steps, strict=True))
        for signs in product((1, -1), repeat=len(steps))
    ]
    return sum(total >= sum(steps) for total in patterns) / len(patterns)


# --------------------------------------------------------------------------------------- success


@pytest.mark.parametrize(("k", "n"), [(0, 10), (3, 10), (10, 10), (57, 120), (1, 1)])
def test_wilson_is_scipys(k: int, n: int) -> None:
    theirs = binomtest(k, n).proportion_ci(method="wilson")
    assert wilson(k, n, z=norm.ppf(0.975)) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_wilson_by_hand() -> None:
    # 5 of 10 at z = 1.96: centre 0.5, half width 1.96 * sqrt(10 * 0.25 + 0.9604) / (10 + 3.8416) = 0.26341
    assert wilson(5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-5)
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("successes", [-0.1, 10.1, math.nan])
def test_wilson_refuses_impossible_counts(successes: float) -> None:
    with pytest.raises(ValueError, match="must lie between"):
        wilson(successes, 10)


def test_success_is_a_mean_over_tasks_not_over_episodes() -> None:
    report = eval_report({"easy": (1.0, 1.0, 1.0, 1.0), "hard": (0.0,), "lost": ()})
    assert (success(report).mean, success(report).n_tasks) == (0.5, 2)
    assert success(report).ci95 == wilson(1.0, 2)


def test_no_scored_episode_is_not_a_success_rate_of_0() -> None:
    with pytest.raises(ValueError, match="no scored episode"):
        success(eval_report({"t": ()}))


# -------------------------------------------------------------------------------------- sign flip


def test_differences_are_of_common_tasks_and_as_many_trials_of_each() -> None:
    baseline = eval_report({"a": (0.0, 0.0), "b": (1.0, 0.0, 1.0), "only": (1.0,), "lost": ()})
    candidate = eval_report({"a": (1.0, 0.0), "b": (0.0,), "lost": (1.0,), "new": (1.0,)})
    assert paired_differences(baseline, candidate) == {"a": 0.5, "b": -1.0}


@pytest.mark.parametrize(
    ("better", "worse", "equal"), [(9, 2, 30), (2, 9, 30), (5, 5, 0), (60, 31, 100), (1, 0, 0), (0, 4, 0)]
)
def test_one_trial_a_task_is_the_exact_mcnemar_test(better: int, worse: int, equal: int) -> None:
    baseline, candidate = paired(better, worse, equal)
    ours = sign_flip_p(list(paired_differences(baseline, candidate).values()))
    assert ours == pytest.approx(binomtest(better, better + worse, 0.5, alternative="greater").pvalue, rel=1e-12)


def test_sign_flip_by_hand() -> None:
    # sizes 1, 1/2, 1/2, observed +1 +1/2 -1/2 = 1: of 8 patterns the sums 2, 1, 1 reach it
    assert sign_flip_p([1.0, 0.5, -0.5]) == 3 / 8
    assert sign_flip_p([0.1, -(0.7 - 0.6)]) == 3 / 4  # the same size, but for the last bit of a float
    assert sign_flip_p([0.0, 0.0]) == 1.0
    assert sign_flip_p([]) == 1.0


@given(st.lists(st.one_of(st.floats(-1, 1), st.sampled_from([-1.0, -0.5, 0.0, 1 / 3, 0.25, 1.0])), max_size=9))
def test_sign_flip_is_enumeration(differences: list[float]) -> None:
    assert sign_flip_p(differences) == by_enumeration(differences)


@given(st.lists(st.integers(1, GRID), min_size=1, max_size=8), st.floats(0.01, 0.49))
@settings(max_examples=40)
def test_the_error_rate_is_at_most_alpha(sizes: list[int], alpha: float) -> None:
    """Over all signs that versions that behave alike could have shown, at most a share alpha is called better."""
    ps = [
        sign_flip_p([s * z / GRID for s, z in zip(signs, sizes, strict=True)])
        for signs in product((1, -1), repeat=len(sizes))
    ]
    assert sum(p <= alpha for p in ps) / len(ps) <= alpha


@pytest.mark.parametrize("n", [1, 200, 1500])
def test_p_is_never_0(n: int) -> None:
    assert 0 < sign_flip_p([1.0] * n) <= 1
    assert sign_flip_p([-1.0] * n) == 1.0


@pytest.mark.parametrize("wrong", [1.5, -1.01, math.nan, math.inf])
def test_differences_outside_the_range_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="outside"):
        sign_flip_p([0.5, wrong])


# --------------------------------------------------------------------------------------- interval


def test_interval_is_agresti_and_mins_for_one_trial_a_task() -> None:
    better, worse, equal = 18, 7, 35
    n, b, c = better + worse + equal + 2, better + 0.5, worse + 0.5
    half = 1.96 * math.sqrt((b + c) - (b - c) ** 2 / n) / n
    ours = difference_ci95([1.0] * better + [-1.0] * worse + [0.0] * equal)
    assert ours == pytest.approx(((b - c) / n - half, (b - c) / n + half), abs=1e-12)


def test_interval_of_agreement_is_not_a_point() -> None:
    low, high = difference_ci95([0.0] * 20)
    assert low < -0.05 < 0.05 < high
    assert difference_ci95([]) == (-1.0, 1.0)


@pytest.mark.parametrize("q", [0.1, 0.5, 0.8])
def test_interval_covers_the_truth(q: float) -> None:
    draw, n, hits = Random(3), 40, 0
    for _ in range(1000):
        low, high = difference_ci95([float(draw.random() < q) - float(draw.random() < 0.4) for _ in range(n)])
        hits += low <= q - 0.4 <= high
    assert hits / 1000 > 0.93


# ----------------------------------------------------------------------------------------- decide


def decided(better: int, worse: int, equal: int) -> Decision:
    baseline, candidate = paired(better, worse, equal)
    return decide(baseline, candidate, now=NOW)


def test_better_is_promoted_with_its_numbers_in_words() -> None:
    decision = decided(15, 3, 12)
    assert (decision.action, decision.n_tasks, decision.difference) == (Action.promote, 30, 0.4)
    assert (decision.baseline, decision.candidate, decision.created_at) == (1, 2, NOW)
    assert decision.p_better == pytest.approx(988 / 2**18)  # 816 + 153 + 18 + 1 ways to reach 15 of 18
    assert "Better is shown" in decision.reasons[0]
    assert "p = 0.0038" in decision.reasons[0]
    assert decision.reasons[1].startswith("Of 30 tasks 15 got better, 3 got worse and 12 stayed equal: +0.400")


def test_worse_is_rolled_back() -> None:
    decision = decided(3, 15, 12)
    assert (decision.action, decision.difference) == (Action.roll_back, -0.4)
    assert "Worse is shown" in decision.reasons[0]


def test_too_little_evidence_is_held() -> None:
    # 7 of 9 discordant: (36 + 9 + 1) / 512 = 0.0898
    decision = decided(7, 2, 20)
    assert decision.action is Action.hold
    assert decision.reasons[0] == "Neither better (p = 0.09) nor worse (p = 0.98) is shown at alpha = 0.05."


def test_the_same_rewards_are_held() -> None:
    decision = decided(0, 0, 40)
    assert (decision.action, decision.p_better, decision.p_worse) == (Action.hold, 1.0, 1.0)
    assert "All 40 tasks have the same reward under both versions." in decision.reasons


@pytest.mark.parametrize(("n", "action"), [(19, Action.hold), (20, Action.promote)])
def test_n_min_is_the_smallest_number_that_may_claim(n: int, action: Action) -> None:
    decision = decided(n, 0, 0)
    assert decision.action is action
    assert ("Nothing is claimed: 19 tasks" in decision.reasons[0]) is (n == 19)


@pytest.mark.parametrize(("n_infra", "action"), [(3, Action.promote), (4, Action.hold)])
@pytest.mark.parametrize("side", [0, 1])
def test_a_large_share_of_infrastructure_failures_is_held(n_infra: int, action: Action, side: int) -> None:
    reports = list(paired(30, 0, 0))
    reports[side] = reports[side].model_copy(update={"n_infra": n_infra})  # 3 of 33 and 4 of 34: 9% and 12%
    decision = decide(*reports, now=NOW)
    assert decision.action is action
    assert ("4 of 34 episodes of version" in decision.reasons[0]) is (action is Action.hold)


def redrawn(report: EvalReport, tasks: Sequence[str]) -> EvalReport:
    """The first attempt at each of `tasks` was lost, and the reward is that of the second."""
    return report.model_copy(update={"n_lost": dict.fromkeys(tasks, (1,))})


def lossy(n_better: int, n_lost: int) -> Decision:
    """45 tasks of which the candidate solves so many more, so many of these at a second attempt."""
    baseline, candidate = paired(n_better, 0, 45 - n_better)
    return decide(baseline, redrawn(candidate, [f"t{n}" for n in range(n_lost)]), now=NOW)


def test_a_candidate_that_is_better_only_where_it_lost_attempts_is_held() -> None:
    # 6 better: p = 1/64. Four of them were lost first, and as failures they are equal: p = 1/4.
    assert lossy(6, 0).action is Action.promote
    decision = lossy(6, 4)
    assert (decision.action, decision.p_better) == (Action.hold, 0.25)
    words = "4 episodes of version 2 lost an attempt to the infrastructure: +0.044 mean reward with each as a failure"
    assert any(reason.startswith(words) for reason in decision.reasons)
    assert lossy(10, 4).action is Action.promote, "the six others show it alone"


def test_a_candidate_that_is_worse_only_where_it_lost_attempts_is_not_rolled_back() -> None:
    baseline, candidate = paired(0, 6, 39)
    assert decide(baseline, candidate, now=NOW).action is Action.roll_back
    decision = decide(baseline, redrawn(candidate, ["t0", "t1", "t2", "t3"]), now=NOW)
    assert (decision.action, decision.p_worse) == (Action.hold, 0.25)


def test_an_episode_that_lost_all_attempts_is_charged_too() -> None:
    baseline, candidate = paired(6, 0, 39)
    rewards = {task: own for task, own in candidate.rewards.items() if task not in ("t43", "t44")}
    update = {"rewards": rewards, "n_infra": 2, "n_lost": {"t43": (3,), "t44": (3,)}}
    lost = candidate.model_copy(update=update)
    assert paired_differences(baseline, charged(lost, 0.0))["t43"] == -1.0
    assert paired_differences(baseline, charged(lost, 1.0))["t43"] == 0.0
    # 6 better and 2 worse of 8: (1 + 8 + 28) / 256
    assert decide(baseline, lost, now=NOW).p_better == pytest.approx(37 / 256)


def test_no_charged_episode_is_cut_off_where_the_baseline_has_fewer() -> None:
    candidate = eval_report({"a": (1.0, 1.0)}, 2, n_lost={"a": (0, 2, 3)})
    assert charged(candidate, 0.0).rewards == {"a": (0.0, 0.0, 1.0)}
    assert paired_differences(eval_report({"a": (1.0, 1.0)}), charged(candidate, 0.0)) == {"a": -1.0}


@pytest.mark.parametrize("side", [0, 1])
def test_an_attempt_that_was_tried_again_counts_as_lost(side: int) -> None:
    reports = list(paired(30, 0, 0))
    reports[side] = redrawn(reports[side], [f"t{n}" for n in range(4)])  # 4 of 30: 13%
    decision = decide(*reports, now=NOW)
    assert decision.action is Action.hold
    assert "4 of 30 episodes of version" in decision.reasons[0]


def test_no_common_task_is_held() -> None:
    decision = decide(eval_report({"a": (1.0,)}), eval_report({"b": (1.0,)}), now=NOW)
    assert (decision.action, decision.n_tasks, decision.difference) == (Action.hold, 0, 0.0)
    assert decision.reasons[-1] == "2 tasks were scored under one version only and are left out."


@pytest.mark.parametrize("changed", [{"suite_hash": "6" * 64}, {"suite": "other"}])
def test_reports_of_different_suites_are_not_compared(changed: dict[str, str]) -> None:
    baseline, candidate = paired(5, 5, 20)
    with pytest.raises(ConfigError, match=r"reports of different suites.*evaluate both"):
        decide(baseline, candidate.model_copy(update=changed), now=NOW)


@pytest.mark.parametrize("alpha", [0.0, 0.5, -1.0])
def test_alpha_must_leave_room_for_both_claims(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha"):
        decide(*paired(5, 5, 20), alpha=alpha, now=NOW)


# ------------------------------------------------------------------------------------------- laws

rewards = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=0, max_size=3).map(tuple)
reports = st.dictionaries(st.sampled_from([f"t{n}" for n in range(30)]), rewards, max_size=30)


@given(reports, reports, st.integers(1, 12), st.floats(0.01, 0.45))
def test_laws_of_a_decision(
    a: dict[str, tuple[float, ...]], b: dict[str, tuple[float, ...]], n_min: int, alpha: float
) -> None:
    baseline, candidate = eval_report(a, 1), eval_report(b, 2)
    decision = decide(baseline, candidate, n_min=n_min, alpha=alpha, now=NOW)
    swapped = decide(candidate, baseline, n_min=n_min, alpha=alpha, now=NOW)
    assert decision == decide(baseline, candidate, n_min=n_min, alpha=alpha, now=NOW)
    assert decision.n_tasks >= n_min or decision.action is Action.hold
    assert swapped.action is SWAPPED[decision.action]
    assert (swapped.p_better, swapped.p_worse) == (decision.p_worse, decision.p_better)
    assert 0 < decision.p_better <= 1
    assert 0 < decision.p_worse <= 1
    assert decision.p_better + decision.p_worse >= 1
    low, high = decision.ci95
    assert -1 <= low <= decision.difference + 1e-12
    assert decision.difference - 1e-12 <= high <= 1
    assert decision.reasons


@given(reports, reports, st.data())
def test_losing_an_attempt_is_never_better_than_failing_it(
    a: dict[str, tuple[float, ...]], b: dict[str, tuple[float, ...]], data: st.DataObject
) -> None:
    lost = {task: tuple(data.draw(st.integers(0, 1)) for _ in own) for task, own in b.items() if own}
    failed = {t: tuple(r * (not n) for r, n in zip(b[t], lost[t], strict=True)) for t in lost}
    baseline, better = eval_report(a, 1), eval_report(b, 2, n_lost=lost)
    hid = decide(baseline, better, n_min=1, max_infra=1.0, now=NOW)
    crashed = decide(baseline, eval_report({t: tuple(sorted(failed[t])) for t in failed}, 2), n_min=1, now=NOW)
    if all(len(a.get(t, ())) >= len(own) for t, own in failed.items()):  # else what is cut off differs
        assert hid.p_better >= crashed.p_better
    assert hid.p_better + hid.p_worse >= 1


@given(st.integers(0, 19), st.integers(0, 1))
def test_never_promotes_on_fewer_than_n_min_tasks(n: int, outcome: int) -> None:
    baseline = eval_report({f"t{i}": (0.0,) * 8 for i in range(n)}, 1)
    candidate = eval_report({f"t{i}": (float(outcome),) * 8 for i in range(n)}, 2)
    assert decide(baseline, candidate, n_min=20, now=NOW).action is Action.hold
    assert decide(candidate, baseline, n_min=20, now=NOW).action is Action.hold
