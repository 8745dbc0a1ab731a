"""Cases that flake as often as admission lets them: how often a gate takes that for a regression."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import pytest
from scipy.stats import binom

from agentloop.gate.eprocess import MAX_RUNS
from agentloop.gate.fold import Fold
from agentloop.gate.outcomes import GateVerdict, Header, Side, SuitePart
from agentloop.gate.result import result_of
from agentloop.mining.admission import MAX_FLAKE

from .simulated import outcome

BANK = 16


def gate(n_cases: int, *, beside_a_mean: bool = False) -> Fold:
    cases, tasks = tuple(f"m{i}" for i in range(n_cases)), ("t",) if beside_a_mean else ()
    made = Fold(Header(suites=(SuitePart(name="s", tasks=tasks, must_pass=cases),), bank_trials=BANK), looks=False)
    for trial in range(BANK if tasks else 0):
        made.add(outcome("t", trial, 1.0, Side.baseline))
    return made


def test_cases_alone_need_no_fresh_attempts_in_a_changed_environment() -> None:
    part = SuitePart(name="s", must_pass=("m0", "m1"))
    made = Fold(Header(suites=(part,), bank_trials=BANK, environment="changed", controls=1), looks=False)
    made.add(outcome("m0", 0, 1.0))
    result = result_of(made)
    assert result.verdict is GateVerdict.inconclusive
    assert result.distrust is None
    assert not any("fresh attempt" in reason for reason in result.reasons)


def broken(n_cases: int, n_banked: int, passes: float, *, beside_a_mean: bool) -> float:
    """Probability that a case with `n_banked` of BANK trials passed is found broken, over all runs there can be."""
    made = gate(n_cases, beside_a_mean=beside_a_mean)
    for trial in range(BANK):
        made.add(outcome("m0", trial, float(trial < n_banked), Side.baseline))
    ended: dict[tuple[bool, ...], bool] = {}
    for runs in product((True, False), repeat=MAX_RUNS):
        case = made.new_case(0, "m0")
        for n, passed in enumerate(runs, 1):
            case.add(passed)
            if case.broken or case.cleared:
                ended[runs[:n]] = case.broken
                break
    return sum(
        passes ** sum(runs) * (1 - passes) ** (len(runs) - sum(runs)) for runs, is_broken in ended.items() if is_broken
    )


def false_alarm(n_cases: int, flake: float, *, beside_a_mean: bool = False) -> float:
    """Probability that a gate says FAIL of the policy that filled the bank, every case of which flakes that often."""
    one = sum(
        binom.pmf(n, BANK, 1 - flake) * broken(n_cases, n, 1 - flake, beside_a_mean=beside_a_mean)
        for n in range(BANK + 1)
    )
    return 1 - (1 - one) ** n_cases


@pytest.mark.parametrize("n_cases", [1, 4, 10, 44, 200])
@pytest.mark.parametrize("beside_a_mean", [False, True])
def test_cases_that_flake_as_often_as_is_admitted_raise_few_false_alarms(n_cases: int, beside_a_mean: bool) -> None:
    assert false_alarm(n_cases, MAX_FLAKE, beside_a_mean=beside_a_mean) <= 0.05


def test_a_case_that_breaks_is_found_all_the_same() -> None:
    """One that passed 16 of 16 and passes one time in ten now: it is cleared when it passes at once."""
    assert broken(44, BANK, 0.1, beside_a_mean=False) >= 0.85


@pytest.mark.slow
def test_whole_gates_do_as_is_computed() -> None:
    n_gates, n_cases, rng = 500, 40, random.Random(5)
    n_failed = sum(verdict is GateVerdict.failed for verdict in simulated(n_gates, n_cases, 1 - MAX_FLAKE, rng))
    assert binom.ppf(0.001, n_gates, expected := false_alarm(n_cases, MAX_FLAKE)) <= n_failed
    assert n_failed <= binom.ppf(0.999, n_gates, expected)


def simulated(n_gates: int, n_cases: int, passes: float, rng: random.Random) -> Iterator[GateVerdict | None]:
    for _ in range(n_gates):
        made = gate(n_cases)
        for task, trial in product((f"m{i}" for i in range(n_cases)), range(BANK)):
            made.add(outcome(task, trial, float(rng.random() < passes), Side.baseline))
        for trial, i in product(range(MAX_RUNS), range(n_cases)):
            if made.decided is None:
                made.add(outcome(f"m{i}", trial, float(rng.random() < passes)))
        made.close()
        yield made.decided
