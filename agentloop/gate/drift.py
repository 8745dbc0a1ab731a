"""Whether the baseline still does what its bank says: how often to roll it out again, and the evidence against it.

A bank saves rollouts and is right as long as nothing but chance could make the baseline's outcomes differ today. In a
comparison with a bank, a drift of the environment looks like a drop of the candidate. Only fresh attempts of the
baseline (controls) tell them apart. With a share f of controls among n rollouts, the evidence that a drop is no drift
grows as f(1 - f)n, whatever the drift, so half of them is best. At one half the bank adds nothing: a pair of attempts
at one task at one time tells as much. Hence two modes and nothing between them: a bank that is trusted, with a few
controls against gross drift, and fresh pairs. Decides nothing about the candidate (`fold.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from agentloop.gate.bursts import banked_burst
from agentloop.gate.eprocess import PRIOR_N, PRIOR_SQUARE, log_mixture, stakes
from agentloop.gate.losses import Tried
from agentloop.gate.outcomes import Header
from agentloop.gate.schedule import Visit

CONTROLS = 24
FIRST = 8
"""In an equal environment: one control in CONTROLS visits, and one in every second of the first 2 * FIRST visits."""
STALE = 0.01
"""Risk of calling a bank stale that is not."""
DOUBT = 6.0
"""Evidence that the bank is stale, 6 : 1, at which no verdict is based on it any more."""
GROSS = 0.1
"""Smallest drift, as a difference of mean rewards, that the bets are sized for; also twice and four times of it."""
SWITCH = 0.03
"""Risk of giving up a bank that is right, by its controls or by bursts: this share of alpha and of beta is kept for
the evidence that starts over then."""


def controls_for(environment: Literal["same", "unknown", "changed"], *, has_baseline: bool) -> int:
    """`Header.controls` for a new gate. has_baseline: its policy can still be rolled out.

    same: a few controls test the bank; without a baseline it is trusted. unknown: every visit is a fresh pair; without
    a baseline the bank is trusted, and the first reason says that nothing tested it. changed: every visit is a fresh
    pair; without a baseline the gate ends with INFRA.
    """
    if environment == "changed":
        return 1
    if not has_baseline:
        return 0
    if environment == "same":
        return CONTROLS
    return 1


def is_control(visit: Visit, controls: int) -> bool:
    """Whether a visit has a baseline attempt beside it that tests the bank. controls: `Header.controls`, above 1."""
    return visit.number % controls == 0 or (visit.number < 2 * FIRST and visit.number % 2 == 0)


def in_bursts(header: Header, bank: Mapping[str, Sequence[Tried]]) -> str | None:
    """A description of bursts in the banked outcomes; None where chance explains their order."""
    for part in header.suites:
        tasks = [(part.families.get(task, ""), [one.reward or 0.0 for one in bank[task]]) for task in part.tasks]
        if (family := banked_burst(tasks)) is not None:
            whose = f"family {family!r}" if family else f"suite {part.name!r}"
            return f"banked outcomes of {whose} failed in bursts (an outage), so the bank is not used"
    return None


class BankCheck:
    """Evidence that fresh attempts of the baseline have another mean than the banked ones of the same tasks."""

    def __init__(self) -> None:
        self.n = 0
        self.total = 0.0
        self._squares = PRIOR_N * PRIOR_SQUARE
        # The weights sum to 1, so the evidence begins at 1.
        self._logs = [-math.log(6)] * 6
        """Three sizes of bets, each on less and on more."""

    def add(self, difference: float) -> None:
        """A fresh reward minus the mean of banked ones, in [-1, 1]."""
        sizes = stakes(self._squares / (PRIOR_N + self.n), GROSS)
        for j, size in enumerate((*sizes, *(-size for size in sizes))):
            # The cap, as in `eprocess.py`, keeps a single control from ruining a bet.
            self._logs[j] += math.log1p(max(-0.9, min(0.9, size)) * difference)
        self.n += 1
        self.total += difference
        self._squares += difference * difference

    @property
    def mean(self) -> float:
        """Mean of the differences; 0 before the first."""
        if self.n:
            return self.total / self.n
        return 0.0

    @property
    def is_stale(self) -> bool:
        """Whether the bank is refuted, at a risk of STALE however often one looks."""
        return log_mixture(self._logs) >= math.log(1 / STALE)

    @property
    def is_enough(self) -> bool:
        """Whether enough controls came to base a verdict on the bank, if there is no doubt."""
        return self.n >= FIRST

    @property
    def is_in_doubt(self) -> bool:
        """Whether what moved the candidate moved the baseline as well, as far as a few controls show."""
        return log_mixture(self._logs) >= math.log(DOUBT)
