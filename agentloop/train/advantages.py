"""Rewards -> advantages: how much better each episode did than its group.

A group holds the episodes of one task under one policy version. Infrastructure failures are not in
it: they have left the baseline as well as the batch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean, stdev

from agentloop.types import Sample


def group_advantages(rewards_G: Sequence[float], *, scale: bool = True, eps: float = 1e-4) -> list[float]:
    """Rewards of one group, centred on the group mean and divided by its spread.

    rewards_G: shape (G,). Returns shape (G,), summing to 0; all zeros when the rewards are equal.
    scale=False drops the division, which otherwise favours tasks with little spread.
    The spread is the sample standard deviation (divisor G - 1).
    Raises ValueError when G < 2: a group of one has no baseline.
    Source: GRPO, arXiv:2402.03300 §4.1.2; scale=False, arXiv:2503.20783.
    """
    if len(rewards_G) < 2:
        raise ValueError(f"a group of {len(rewards_G)} has no baseline; roll out at least 2 episodes a task")
    mean = fmean(rewards_G)
    divisor = stdev(rewards_G) + eps if scale else 1.0
    return [(reward - mean) / divisor for reward in rewards_G]


def with_advantages(samples: Sequence[Sample]) -> tuple[list[Sample], Counter[str]]:
    """(samples that carry a gradient, why the others carry none -> how many)."""
    groups: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample)
    useful: list[Sample] = []
    dropped: Counter[str] = Counter()
    for group in groups.values():
        rewards = [sample.reward for sample in group]
        if len(group) < 2:
            dropped["group_of_one"] += 1
        elif min(rewards) == max(rewards):
            dropped["all_passed" if rewards[0] >= 1.0 else "all_failed" if rewards[0] <= 0.0 else "all_equal"] += len(
                group
            )
        else:
            advantages = group_advantages(rewards)
            useful += [s.model_copy(update={"advantage": a}) for s, a in zip(group, advantages, strict=True)]
    return useful, dropped
