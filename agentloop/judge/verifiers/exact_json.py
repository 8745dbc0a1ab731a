"""JSON whose numbers mean what is written: integers and decimals, never rounded to binary floats.

Both what an agent submits and what a task expects pass through here, so that both are compared as decimals.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

MAX_CHARACTERS = 1 << 20
"""Of an answer; a longer one is no answer."""
MAX_DIGITS = 1_000
"""Of a number, on either side of the decimal point; more would make comparing slow."""


def read_json(text: str) -> Any:
    """One JSON value, read strictly: no NaN, no infinities, no key twice, no number of more than MAX_DIGITS.

    Integers are int, other numbers Decimal. Raises ValueError, or RecursionError for what is nested too deeply.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{len(text)} characters")
    return json.loads(text, parse_constant=_refuse, parse_float=_decimal, parse_int=_integer, object_pairs_hook=_once)


def exact(value: Any) -> Any:
    """A value of a task with decimals in place of floats: 0.1 is the 0.1 that somebody wrote.

    Raises ValueError for NaN and infinities.
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is no JSON number")
        return Decimal(repr(value))
    if isinstance(value, dict):
        return {key: exact(below) for key, below in value.items()}
    return [exact(below) for below in value] if isinstance(value, list | tuple) else value


def identity(value: Any) -> Any:
    """Something hashable that is equal for equal JSON values: `1` is `1.0` and is not `true`."""
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, dict):
        return ("object", frozenset((key, identity(below)) for key, below in value.items()))
    return ("array", tuple(map(identity, value))) if isinstance(value, list) else value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _decimal(digits: str) -> Decimal:
    exponent = digits.lower().partition("e")[2]
    if len(digits) > MAX_DIGITS or len(exponent) > 5 or abs(int(exponent or 0)) > MAX_DIGITS:
        raise ValueError(f"{digits[:40]} has more than {MAX_DIGITS:,} digits")
    return Decimal(digits)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key is given twice")
    return value
