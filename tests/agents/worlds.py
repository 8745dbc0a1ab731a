"""Environments of our own for tests: one that says what it was told, and one that goes wrong when it is asked to."""

from __future__ import annotations

import os
import string
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Counter(gymnasium.Env[Any, Any]):
    """Adds what it is told to a number that begins with its seed, and ends at `end`. It can be reset once.

    wrong: what an action 9 does: raise, die, or give that reward.
    """

    def __init__(self, end: int = 100, wrong: str = "raise", render_mode: str | None = None) -> None:
        self.action_space = spaces.Discrete(10)
        self.observation_space = spaces.Box(-1e9, 1e9, (2,), np.float64)
        self.end, self.wrong, self.total, self.resets = end, wrong, 0, 0
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.resets += 1
        if self.resets > 1:
            raise RuntimeError("reset by nobody")
        if self.wrong == "no reset":
            raise RuntimeError("no world today")
        self.total, self.steps = (seed or 0) % 50, 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        reward = int(action) / 10
        if action == 9:
            if self.wrong == "raise":
                raise RuntimeError("the floor is gone")
            if self.wrong == "die":
                os._exit(7)
            reward = float(self.wrong)
        self.total += int(action)
        return self._seen(), reward, self.total >= self.end, self.steps >= 50, {}

    def _seen(self) -> Any:
        return np.array([self.total, self.steps], np.float64)


class Echo(gymnasium.Env[Any, Any]):
    """Says in words what it heard, and how often. Rewards 0.5 for each letter a, and ends at `end` words.

    numbers: its observations are numbers.
    """

    def __init__(self, end: int = 100, numbers: bool = False) -> None:
        self.action_space = spaces.Text(20, charset=string.ascii_lowercase + " ")
        self.observation_space = spaces.Discrete(2) if numbers else spaces.Text(100, charset=string.printable)
        self.end, self.n = end, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return f"echo {seed} listens", {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n += 1
        return f"{self.n}: {action}", 0.5 * action.count("a"), self.n >= self.end, False, {}


gymnasium.register("Counter-v0", Counter)
gymnasium.register("Echo-v0", Echo)
