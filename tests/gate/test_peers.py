"""The rules that `benchmarks/gate_others.py` compares ours with, on outcomes small enough to count by hand."""

from __future__ import annotations

import sys
from math import nan
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gate_others import World, counts, python_at_least, wins_minus_losses


def world(baseline: list[list[float]], candidate: list[list[float]]) -> World:
    before, after = np.array(baseline), np.array(candidate)
    return World(before, before, after)


@pytest.mark.parametrize(
    ("baseline", "candidate", "verdict"),
    [
        ([[1, 0, 0]], [[1, 1, 0]], "PASS"),
        ([[1, 1, 0]], [[1, 1, 0]], "FAIL"),  # no win is no reason to promote
        ([[0, 0, 1]], [[1, 1, 0]], "PASS"),  # two wins, one loss
        ([[0, 0]], [[1, nan]], "FAIL"),  # one win, and an attempt that could not run loses even to a failed one
        ([[nan, nan]], [[0, nan]], "PASS"),  # a failed attempt beats one that could not run; neither ran: a tie
        ([[0, 0], [1, 1]], [[1, 0], [0, 0]], "PASS"),  # only the first attempt at each task is counted
    ],
)
def test_wins_minus_losses(baseline: list[list[float]], candidate: list[list[float]], verdict: str) -> None:
    assert wins_minus_losses([world(baseline, candidate)], 1) == [verdict]


def test_a_lost_attempt_is_a_failed_trial_for_rules_that_count_passes() -> None:
    assert counts(np.array([[1.0, nan], [0.0, 1.0]])) == (2, 4)


@pytest.mark.slow
def test_a_python_that_nobody_has_is_not_found() -> None:
    assert python_at_least(sys.version_info[:2]) == sys.executable
    assert python_at_least((9, 0)) is None
