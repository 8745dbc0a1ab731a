"""Which tasks to roll out next: those that fail, without forgetting those that pass.

Pools are drawn in proportion to 1.05 minus their recent success. Without this, the gradients of
pools that are going well can drive a weak one to zero, from where its own episodes never bring it
back: every group fails alike and carries no gradient. A pool in that state is revived by
imitating what once passed there (`trainers/revival.py`).
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence

from agentloop.types import Task

DECAY = 0.8
"""Weight of the past in a pool's moving success rate."""
FLOOR = 0.05
"""Weight of a pool that always passes."""


class Curriculum:
    """Moving success rates by pool; restored from `rates`, starting at 0 for pools not in it."""

    def __init__(self, tasks: Sequence[Task], rates: Mapping[str, float] | None = None) -> None:
        self._tasks: defaultdict[str, list[Task]] = defaultdict(list)
        for task in tasks:
            self._tasks[task.pool].append(task)
        self.rates = {pool: (rates or {}).get(pool, 0.0) for pool in sorted(self._tasks)}

    @property
    def remaining(self) -> float:
        """Share that fails, over pools: what there is left to learn."""
        return 1.0 - sum(self.rates.values()) / len(self.rates)

    def draw(self, n: int, rng: random.Random) -> list[Task]:
        """`n` tasks: each from a pool drawn by its weight, evenly within the pool."""
        pools = list(self.rates)
        weights = [1.0 + FLOOR - self.rates[pool] for pool in pools]
        return [rng.choice(self._tasks[pool]) for pool in rng.choices(pools, weights, k=n)]

    def observe(self, pool: str, rewards_G: Sequence[float]) -> None:
        """Take in one group's rewards, infrastructure failures already removed."""
        if rewards_G:
            mean = sum(rewards_G) / len(rewards_G)
            self.rates[pool] = DECAY * self.rates[pool] + (1 - DECAY) * mean
