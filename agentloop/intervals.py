"""Confidence intervals of what was counted."""

from __future__ import annotations

import math

Z95 = 1.96
"""Quantile of the normal distribution for a two-sided 95%, to the places that published figures are made with."""


def wilson(successes: float, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a proportion, within [0, 1]; n = 0 says nothing and gives (0, 1).

    successes: in [0, n], fractional for partial credit; outside it raises ValueError.
    Source: E. B. Wilson, JASA 22 (1927) 209-212.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}: must lie between 0 and {n}")
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    spread = z * z / n
    centre = (p + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(p * (1 - p) / n + spread / (4 * n))
    return max(0.0, centre - half), min(1.0, centre + half)
