"""What is drawn next: weights and moving averages by hand, and frequencies within their spread."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from scipy.stats import chisquare

from agentloop.train.curriculum import Curriculum
from agentloop.types import Task

TASKS = [
    Task(id=f"{pool}{n}", instruction="", pool=pool)
    for pool, size in (("strong", 5), ("weak", 2))
    for n in (range(size))
]


def test_pools_are_drawn_by_their_failure_and_tasks_evenly_within() -> None:
    # Weights 1.05 - 0.9 = 0.15 and 1.05 - 0.45 = 0.6: one draw in five from the strong pool.
    curriculum = Curriculum(TASKS, {"strong": 0.9, "weak": 0.45})
    n = 4000
    drawn = Counter(task.id for task in curriculum.draw(n, random.Random(11)))
    expected = {task.id: n * (0.2 / 5 if task.pool == "strong" else 0.8 / 2) for task in TASKS}
    assert set(drawn) <= set(expected)
    assert chisquare([drawn[i] for i in expected], list(expected.values())).pvalue > 1e-3


def test_a_pool_that_always_passes_is_not_forgotten() -> None:
    curriculum = Curriculum(TASKS, {"strong": 1.0, "weak": 0.0})
    drawn = Counter(task.pool for task in curriculum.draw(4000, random.Random(12)))
    # Weights 0.05 and 1.05.
    assert chisquare([drawn["strong"], drawn["weak"]], [4000 / 22, 4000 * 21 / 22]).pvalue > 1e-3


def test_draws_repeat_with_their_seed() -> None:
    curriculum = Curriculum(TASKS)
    assert curriculum.draw(20, random.Random(1)) == curriculum.draw(20, random.Random(1))
    assert curriculum.draw(20, random.Random(1)) != curriculum.draw(20, random.Random(2))


def test_the_moving_rate_by_hand() -> None:
    curriculum = Curriculum(TASKS, {"strong": 0.5})
    assert curriculum.rates == {"strong": 0.5, "weak": 0.0}
    curriculum.observe("strong", [1.0, 1.0, 0.0, 1.0])  # 0.8 * 0.5 + 0.2 * 0.75
    assert curriculum.rates["strong"] == pytest.approx(0.55)
    curriculum.observe("strong", [0.0])  # 0.8 * 0.55
    assert curriculum.rates["strong"] == pytest.approx(0.44)
    curriculum.observe("weak", [])
    assert curriculum.rates["weak"] == 0.0


def test_rates_of_pools_that_are_gone_are_not_carried_on() -> None:
    assert Curriculum(TASKS, {"gone": 1.0}).rates == {"strong": 0.0, "weak": 0.0}
