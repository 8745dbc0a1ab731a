"""What a turn may spend: attempts, money, minutes. Recorded attempts count as those that are made now."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from agentloop.costs.totals import completions
from agentloop.types import Attempt


@dataclass
class Budget:
    """Bounds, and what was spent of them."""

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
    usd: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def spend(self, attempts: Iterable[Attempt]) -> None:
        """Count the money of attempts."""
        for attempt in attempts:
            self.usd += sum(completion.cost_usd or 0.0 for completion in completions(attempt.trace))

    @property
    def mean_usd(self) -> float:
        """Of an attempt."""
        return self.usd / max(1, self.n_attempts + self.n_lost)

    def why_over(self, n: int, usd: float = 0.0) -> str | None:
        """The bound that `n` more attempts would exceed. usd: spent elsewhere, as on the rewriter."""
        if self.n_attempts + n > self.max_attempts - self.n_reserved:
            return f"max_attempts = {self.max_attempts}"
        if self.max_usd is not None and self.usd + usd + n * self.mean_usd > self.max_usd:
            return f"max_usd = {self.max_usd:g}"
        if self.max_minutes is not None and time.monotonic() - self.started > 60 * self.max_minutes:
            return f"max_minutes = {self.max_minutes:g}"
        return None
