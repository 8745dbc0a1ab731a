"""Advantages against hand calculation and numpy, and the count of every row that carries none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.train.advantages import group_advantages, with_advantages

from .rows import row

REWARDS = st.lists(st.floats(0.0, 1.0), min_size=2, max_size=16)


def test_by_hand() -> None:
    # Rewards 1, 0, 0, 1: mean 0.5, sample variance 4 * 0.25 / 3 = 1/3, spread 0.57735.
    up = 0.5 / (0.5773502691896258 + 1e-4)
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == pytest.approx([up, -up, -up, up], rel=1e-12)
    # Rewards 1, 0, 0 without the division: mean 1/3.
    assert group_advantages([1.0, 0.0, 0.0], scale=False) == pytest.approx([2 / 3, -1 / 3, -1 / 3], rel=1e-12)


@given(REWARDS)
def test_they_are_numpys_with_the_sample_deviation(rewards: list[float]) -> None:
    r = np.array(rewards)
    expected = (r - r.mean()) / (r.std(ddof=1) + 1e-4)
    assert group_advantages(rewards) == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-9)


@given(REWARDS, st.booleans())
def test_they_sum_to_zero_and_keep_the_order(rewards: list[float], scale: bool) -> None:
    advantages = group_advantages(rewards, scale=scale)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-9)
    order = sorted(range(len(rewards)), key=lambda i: rewards[i])
    assert [advantages[i] for i in order] == sorted(advantages)


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("scale", [True, False])
def test_equal_rewards_carry_nothing(value: float, scale: bool) -> None:
    assert group_advantages([value] * 5, scale=scale) == [0.0] * 5


@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_a_group_without_a_baseline_is_refused(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match=f"a group of {len(rewards)} has no baseline"):
        group_advantages(rewards)


def test_rows_without_a_gradient_are_counted_by_reason() -> None:
    groups = {
        "failed": [0.0, 0.0, 0.0],
        "passed": [1.0, 1.0],
        "alike": [0.5, 0.5],
        "alone": [1.0],
        "mixed": [1.0, 0.0, 0.0],
    }
    samples = [row(group=name, reward=reward) for name, rewards in groups.items() for reward in rewards]
    useful, dropped = with_advantages(samples)
    assert dropped == {"all_failed": 3, "all_passed": 2, "all_equal": 2, "group_of_one": 1}
    assert len(useful) + dropped.total() == len(samples)
    assert [s.group for s in useful] == ["mixed"] * 3
    # Mean 1/3, sample variance (4/9 + 1/9 + 1/9) / 2 = 1/3.
    spread = 3**-0.5 + 1e-4
    assert [s.advantage for s in useful] == pytest.approx([2 / 3 / spread, -1 / 3 / spread, -1 / 3 / spread])


def test_groups_are_compared_with_themselves_even_when_their_rows_are_mixed_up() -> None:
    samples = [row(group=g, reward=r) for g, r in [("a", 1.0), ("b", 0.2), ("a", 0.0), ("b", 0.4)]]
    useful, dropped = with_advantages(samples)
    assert not dropped
    found = {(s.group, s.reward): s.advantage for s in useful}
    # Two rewards d apart: half of d over d / sqrt(2).
    high, low = 0.5 / (0.5**0.5 + 1e-4), 0.1 / (0.2 * 0.5**0.5 + 1e-4)
    expected = {("a", 1.0): high, ("a", 0.0): -high, ("b", 0.4): low, ("b", 0.2): -low}
    assert found == pytest.approx(expected)
