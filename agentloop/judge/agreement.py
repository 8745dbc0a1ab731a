"""How far verifiers agree with people, on the traces that both have judged.

A yes is a number of at least 0.5. Intervals are 95%: Wilson's for shares, percentiles of a seeded
bootstrap over traces for the rest. Traces come to people because they were disputed or sampled; only
the sampled ones are like all others, so an agreement on disputed ones is lower than it is in general.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from agentloop.intervals import wilson
from agentloop.store.store import Store
from agentloop.store.tables import AgreementRow

YES = 0.5
N_BINS = 10
N_RESAMPLES = 1000
Pair = tuple[float, float]
"""(a verifier's number, a person's)."""


class Figure(NamedTuple):
    """A measure with its 95% interval; None where it is not defined."""

    value: float | None
    low: float | None
    high: float | None


class Agreement(NamedTuple):
    """One version of one verifier beside people."""

    verifier: str
    version: str
    n: int
    accuracy: Figure
    """Share of traces on which both say yes or both say no."""
    kappa: Figure
    """Cohen's: agreement beyond chance, 1 is whole, 0 is chance. Not defined when both only ever say one thing."""
    brier: Figure
    """Mean squared distance of the numbers."""
    ece: Figure
    """Expected calibration error: mean distance, over ten bins, of the mean number from the share of yeses."""


def measure(store: Store, filter: str = "", *, project: str) -> list[Agreement]:
    """Measured on what is stored, and remembered. Raises ConfigError for a filter that is none."""
    pairs: defaultdict[tuple[str, str], list[Pair]] = defaultdict(list)
    for _, verifier, version, value, gold in store.gold(filter, project=project):
        pairs[verifier, version].append((value, gold))
    agreements = [agreement(verifier, version, pairs[verifier, version]) for verifier, version in sorted(pairs)]
    now = datetime.now(UTC)
    store.put_agreement(
        [
            AgreementRow(project=project, verifier=a.verifier, version=a.version, measured_at=now, body=document(a))
            for a in agreements
        ]
    )
    return agreements


def agreement(verifier: str, version: str, pairs: Sequence[Pair]) -> Agreement:
    """pairs: at least one."""
    n_same = sum((value >= YES) == (gold >= YES) for value, gold in pairs)
    return Agreement(
        verifier,
        version,
        len(pairs),
        Figure(n_same / len(pairs), *wilson(n_same, len(pairs))),
        *(_bootstrapped(figure, pairs) for figure in (kappa, brier, ece)),
    )


def kappa(pairs: Sequence[Pair]) -> float | None:
    """Cohen 1960, doi:10.1177/001316446002000104."""
    n = len(pairs)
    yes = sum(value >= YES for value, _ in pairs) / n
    gold = sum(gold >= YES for _, gold in pairs) / n
    chance = yes * gold + (1 - yes) * (1 - gold)
    same = sum((value >= YES) == (gold >= YES) for value, gold in pairs) / n
    if chance >= 1.0:
        return None
    return (same - chance) / (1.0 - chance)


def brier(pairs: Sequence[Pair]) -> float:
    """0 is perfect."""
    return math.fsum((value - gold) ** 2 for value, gold in pairs) / len(pairs)


def ece(pairs: Sequence[Pair]) -> float:
    """0 is calibrated. Source: arXiv:1706.04599 §2."""
    bins: defaultdict[int, list[Pair]] = defaultdict(list)
    for value, gold in pairs:
        bins[min(N_BINS - 1, int(value * N_BINS))].append((value, float(gold >= YES)))
    return math.fsum(abs(math.fsum(v - g for v, g in inside)) for inside in bins.values()) / len(pairs)


def document(agreement: Agreement) -> dict[str, object]:
    """As JSON."""
    figures = {name: it._asdict() for name, it in agreement._asdict().items() if isinstance(it, Figure)}
    return {"verifier": agreement.verifier, "version": agreement.version, "n": agreement.n, **figures}


def _bootstrapped(figure: Callable[[Sequence[Pair]], float | None], pairs: Sequence[Pair]) -> Figure:
    """Percentiles over resamples in which the figure is defined; the seed is fixed, so the same pairs give the same."""
    rng = random.Random(0)
    drawn = (figure(rng.choices(pairs, k=len(pairs))) for _ in range(N_RESAMPLES))
    values = sorted(value for value in drawn if value is not None)
    value = figure(pairs)
    if value is None or not values:
        return Figure(value, None, None)
    return Figure(value, values[int(0.025 * len(values))], values[math.ceil(0.975 * len(values)) - 1])
