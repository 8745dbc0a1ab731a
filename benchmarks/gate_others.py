"""Gates that people have, for `gate.py` to compare with: (does it fail the candidate, rollouts) for every world."""

from __future__ import annotations

from functools import cache

import numpy as np
from gate_worlds import Array
from scipy.stats import binom

LEVEL, STEP = 0.05, 50
Verdicts = list[tuple[bool, int]]


def naive(p: Array, q: Array, rng: np.random.Generator, n: int, tolerance: float) -> Verdicts:
    """Fails on a drop in success rate of more than `tolerance` over the first n tasks, one trial each side."""
    before, after = (rng.random((len(p), n)) < one[:, :n] for one in (p, q))
    return [(bool(drop > tolerance + 1e-12), 2 * n) for drop in before.mean(1) - after.mean(1)]


def mcnemar(p: Array, q: Array, rng: np.random.Generator, n: int) -> Verdicts:
    """Exact and one-sided, on n pairs over the tasks in turn."""
    wins, losses = discordant(p, q, rng, n)
    return [(p_value(int(w), int(d)) <= LEVEL, 2 * n) for w, d in zip(wins[:, -1], losses[:, -1], strict=True)]


def peeking(p: Array, q: Array, rng: np.random.Generator, n: int) -> Verdicts:
    """The same, looked at after every STEP pairs, and stopped at the first p-value below LEVEL."""
    found: Verdicts = []
    for wins, losses in zip(*discordant(p, q, rng, n), strict=True):
        looks = range(STEP - 1, n, STEP)
        stop = next((t for t in looks if p_value(int(wins[t]), int(losses[t])) <= LEVEL), None)
        found.append((False, 2 * n) if stop is None else (True, 2 * (stop + 1)))
    return found


def discordant(p: Array, q: Array, rng: np.random.Generator, n: int) -> tuple[Array, Array]:
    """(pairs that the candidate alone passes, pairs that it alone fails) after each of n pairs."""
    tasks = np.arange(n) % p.shape[1]
    before, after = (rng.random((len(p), n)) < one[:, tasks] for one in (p, q))
    return (after & ~before).cumsum(1), (before & ~after).cumsum(1)


@cache
def p_value(wins: int, losses: int) -> float:
    """Chance of so many losses among the discordant pairs, were both sides as likely."""
    return float(binom.sf(losses - 1, wins + losses, 0.5))
