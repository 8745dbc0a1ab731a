"""What a turn may spend: attempts, money, minutes. Recorded attempts count as those that are made now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentloop.costs.totals import completions
from agentloop.train.trainers.clock import TurnClock
from agentloop.types import Attempt


@dataclass
class Budget:
    """Bounds, and what was spent of them. A fork counts as an attempt, and costs what forks cost."""

    clock: TurnClock
    max_attempts: int
    max_usd: float | None = None
    max_minutes: float | None = None
    n_reserved: int = 0
    """Attempts that are kept for later."""
    n_attempts: int = 0
    """Attempts with a reward."""
    n_lost: int = 0
    """Attempts without one, which were made again."""
    n_forks: int = 0
    """Single steps from a recorded attempt."""
    attempts_usd: float = 0.0
    forks_usd: float = 0.0

    def spend(self, attempts: Sequence[Attempt]) -> None:
        """Count the money and the time of attempts."""
        self.attempts_usd += _usd(attempts)
        self.clock.note(attempts)

    def spend_forks(self, forks: Sequence[Attempt]) -> None:
        """Count forks, their money and their time."""
        self.n_forks += len(forks)
        self.forks_usd += _usd(forks)
        self.clock.note(forks)

    @property
    def usd(self) -> float:
        """Spent so far."""
        return self.attempts_usd + self.forks_usd

    @property
    def mean_usd(self) -> float:
        """Of an attempt."""
        return self.attempts_usd / max(1, self.n_attempts + self.n_lost)

    def why_over(self, n: int, usd: float = 0.0, *, are_forks: bool = False) -> str | None:
        """The bound that `n` more attempts would exceed. usd: spent elsewhere, as on the rewriter."""
        if self.n_attempts + self.n_forks + n > self.max_attempts - self.n_reserved:
            return f"max_attempts = {self.max_attempts}"
        mean_usd = self.forks_usd / self.n_forks if are_forks and self.n_forks else self.mean_usd
        if self.max_usd is not None and self.usd + usd + n * mean_usd > self.max_usd:
            return f"max_usd = {self.max_usd:g}"
        if self.max_minutes is not None and self.clock.minutes > self.max_minutes:
            return f"max_minutes = {self.max_minutes:g}"
        return None


def _usd(attempts: Sequence[Attempt]) -> float:
    return sum(completion.cost_usd or 0.0 for attempt in attempts for completion in completions(attempt.trace))
