"""Worlds in which attempts are lost, fail together, or meet another environment than the baseline did, for `gate.py`.

A world is drawn as arrays before any gate sees it, so every gate sees the same attempts. One loop of the schedule is a
round: N_TASKS visits. A *family* is FAMILY tasks with consecutive ids; an outage makes every attempt of a family in one
round fail, on whichever side. *Drift* is the share of attempts that the environment breaks now, and did not break when
the baseline was recorded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from gate_worlds import DELTA, KINDS, N_TASKS, Array, K, shifted, worlds

FAMILY, TRIES, N_ROUNDS = 20, 3, 14
"""Tasks of a family; attempts at a trial before it is lost for good; rounds that are drawn."""
Ints = np.ndarray[Any, np.dtype[np.int64]]


class Hostile(NamedTuple):
    """What goes wrong in a world; shares are of attempts."""

    kind: str = "null"
    """Of `gate_worlds`: what the candidate really is."""
    lost: float = 0.0
    """Share lost at random: the candidate's, and the baseline's now."""
    lost_before: float = 0.0
    """Share lost at random while the baseline was recorded."""
    lost_wrong: float = 0.0
    """Share of wrong attempts lost, on both sides at all times (tests that time out)."""
    hides: float = 0.0
    """Share of its wrong attempts that the candidate alone turns into losses."""
    outages: float = 0.0
    """Share of (family, round) pairs in which everything fails."""
    drift: float = 0.0


WORLDS = {
    **{kind: Hostile(kind) for kind in KINDS},
    "losses 2%": Hostile(lost=0.02, lost_before=0.02),
    "losses 5%": Hostile(lost=0.05, lost_before=0.05),
    "losses 10%": Hostile(lost=0.1, lost_before=0.1),
    "losses 2%, none before": Hostile(lost=0.02),
    "losses 5%, none before": Hostile(lost=0.05),
    "wrong ones lost 10%": Hostile(lost_wrong=0.1),
    "wrong ones lost 10%, -5": Hostile("down5", lost_wrong=0.1),
    "losses 5%, -5": Hostile("down5", lost=0.05, lost_before=0.05),
    "losses 10% before, -5": Hostile("down5", lost_before=0.1),
    "hides 30% of wrong, -5": Hostile("down5", hides=0.3),
    "hides 30% of wrong, -15": Hostile("down15", hides=0.3),
    "hides all wrong, -15": Hostile("down15", hides=1.0),
    "outages 1%": Hostile(outages=0.01),
    "outages 2%": Hostile(outages=0.02),
    "outages 5%": Hostile(outages=0.05),
    "outages 10%": Hostile(outages=0.1),
    "outages 20%": Hostile(outages=0.2),
    "outages 2%, -5": Hostile("down5", outages=0.02),
    "outages 5%, -5": Hostile("down5", outages=0.05),
    "outages 10%, -5": Hostile("down5", outages=0.1),
    "outages 20%, -5": Hostile("down5", outages=0.2),
    "drift 1%": Hostile(drift=0.01),
    "drift 2%": Hostile(drift=0.02),
    "drift 5%": Hostile(drift=0.05),
    "drift 10%": Hostile(drift=0.1),
    "drift -5%, -5": Hostile("down5", drift=-0.05),
    "drift 5%, -5": Hostile("down5", drift=0.05),
    "hides 10% of wrong, bank lost 5%, -5": Hostile("down5", hides=0.1, lost_before=0.05),
    "hides 20% of wrong, bank lost 10%, -5": Hostile("down5", hides=0.2, lost_before=0.1),
    "hides 10% of wrong, losses 5%, -5": Hostile("down5", hides=0.1, lost=0.05, lost_before=0.05),
    "hides 20% of wrong, losses 10%, -5": Hostile("down5", hides=0.2, lost=0.1, lost_before=0.1),
}


class Attempts(NamedTuple):
    """Trials of one side: (trial of the task, task) each."""

    reward: Array
    """Of the first attempt that was not lost; nan where all were."""
    n_lost: Ints


class World(NamedTuple):
    """All attempts that a gate may ask for."""

    bank: Attempts
    baseline: Attempts
    """Now, at the time of the candidate's attempts of the same number."""
    candidate: Attempts


def world(name: str, seed: int) -> World:
    """The same for the same seed."""
    what = WORLDS[name]
    rng = np.random.default_rng([7, list(WORLDS).index(name), seed])
    [p], [q] = worlds(what.kind, 1, 1000 + seed)
    if what.kind == "down5":  # as measured: what the environment breaks is no part of the drop
        [q] = shifted(p[None], -DELTA / (1 - what.outages) / (1 - max(what.drift, 0.0)))
    then, now = out(what.outages, K, rng), out(what.outages, N_ROUNDS, rng)
    breaks, mends = max(what.drift, 0.0), max(-what.drift, 0.0)
    before = attempts(p, K, what.lost_before, what.lost_wrong, then, mends, rng, tries=50)
    theirs = attempts(p, N_ROUNDS, what.lost, what.lost_wrong, now, breaks, rng)
    mine = attempts(q, N_ROUNDS, what.lost, max(what.lost_wrong, what.hides), now, breaks, rng)
    return World(before, theirs, mine)


def out(share: float, n: int, rng: np.random.Generator) -> Array:
    """(n, N_TASKS): whether a task's family is out in a round."""
    return np.repeat(rng.random((n, N_TASKS // FAMILY)) < share, FAMILY, axis=1)


def attempts(
    p: Array,
    n: int,
    lost: float,
    lost_wrong: float,
    outages: Array,
    broken: float,
    rng: np.random.Generator,
    tries: int = TRIES,
) -> Attempts:
    """n trials of every task, each with up to `tries` attempts."""
    reward, n_lost = np.full((n, N_TASKS), np.nan), np.zeros((n, N_TASKS), dtype=np.int64)
    for _ in range(tries):
        passes = (rng.random((n, N_TASKS)) < p) & (rng.random((n, N_TASKS)) >= broken) & ~outages
        is_lost = (rng.random((n, N_TASKS)) < lost) | (~passes & (rng.random((n, N_TASKS)) < lost_wrong))
        is_open = np.isnan(reward)
        reward[is_open & ~is_lost] = passes[is_open & ~is_lost]
        n_lost += is_open & is_lost
        if not np.isnan(reward).any():
            break
    return Attempts(reward, n_lost)
