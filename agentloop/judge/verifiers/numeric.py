"""The verifier for numbers: 42, 42.0 and 4.2e1 are the same answer."""

from __future__ import annotations

import math
import re

from agentloop.protocols import Sandbox
from agentloop.types import Trace

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
"""Narrower than `float()`, which also reads `nan`, `infinity`, `1_000` and digits of every script."""


class Numeric:
    """1.0 when the submitted answer is one finite decimal number within `tolerance` of `expected`, else 0.0.

    tolerance: absolute, in the unit of the answer. Compared as binary floats, so integers beyond
    2**53 want `Exact`. Raises ValueError for bounds that would accept every answer or none.
    """

    name, version = "numeric", "1"

    def __init__(self, expected: float, tolerance: float = 0.0) -> None:
        if not math.isfinite(expected):
            raise ValueError(f"numeric: expected must be finite, not {expected}")
        if not (math.isfinite(tolerance) and tolerance >= 0):
            raise ValueError(f"numeric: tolerance must be finite and at least 0, not {tolerance}")
        self.expected = expected
        self.tolerance = tolerance

    async def score(self, trace: Trace, sandbox: Sandbox | None) -> float:
        """0.0 when nothing was submitted or it is not a number and nothing else."""
        text = (trace.answer or "").strip()
        if not _NUMBER.fullmatch(text):
            return 0.0
        # An answer too large for a float reads as infinity, whose distance is never within tolerance.
        return float(abs(float(text) - self.expected) <= self.tolerance)
