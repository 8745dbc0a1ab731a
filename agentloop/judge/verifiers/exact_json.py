"""JSON with exact numbers: integers and decimals, never rounded to binary floats.

Both submitted and expected values pass through here, so both are compared as decimals.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

MAX_CHARACTERS = 1 << 20
"""Maximum number of characters of an answer."""
MAX_DIGITS = 1_000
"""Maximum number of digits on either side of the decimal point. More would make comparisons slow."""


def read_json(text: str) -> Any:
    """One JSON value, parsed strictly: no NaN, no infinities, no duplicate keys, no number of more than MAX_DIGITS
    digits.

    Integers become int, other numbers Decimal. Raises ValueError, or RecursionError for deeply nested values.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{len(text)} characters")
    return json.loads(text, parse_constant=_refuse, parse_float=_decimal, parse_int=_integer, object_pairs_hook=_once)


def exact(value: Any) -> Any:
    """A task's value with decimals in place of floats: 0.1 becomes the decimal 0.1.

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
    """A hashable value that is equal for equal JSON values: `1` equals `1.0` but not `true`."""
    # In Python True equals 1 and has its hash.
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, dict):
        return ("object", frozenset((key, identity(below)) for key, below in value.items()))
    return ("array", tuple(map(identity, value))) if isinstance(value, list) else value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _integer(digits: str) -> int:
    # `int` itself refuses only texts of more than 4,300 digits.
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _decimal(digits: str) -> Decimal:
    exponent = digits.lower().partition("e")[2]
    # The length of the exponent comes first: `int` of a long text is slow, and refuses more than 4,300 digits.
    if len(digits) > MAX_DIGITS or len(exponent) > 5 or abs(int(exponent or 0)) > MAX_DIGITS:
        raise ValueError(f"{digits[:40]} has more than {MAX_DIGITS:,} digits")
    return Decimal(digits)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key is given twice")
    return value
