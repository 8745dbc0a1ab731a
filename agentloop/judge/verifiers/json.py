"""The verifier for answers that are JSON: of a schema, or with what was expected in it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import re2
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import SchemaError
from referencing import Registry

from agentloop.protocols import Sandbox
from agentloop.types import Trace

MAX_CHARACTERS = 1 << 20
"""Of an answer; a longer one is no answer."""


class Json:
    """1.0 when the submitted answer is one JSON value that fits, else 0.0.

    schema: a JSON schema (draft 2020-12). Its patterns are RE2's, and references lead nowhere outside of it.
    subset: what must be in the answer: each key of an object with its value, an array item by item; `1` is `1.0`
    and is not `true`. Both may be given. NaN, infinities, numbers beyond a float and keys given twice are not JSON.
    Raises ValueError for a schema that is none. Source: jsonschema.
    """

    name, version = "json", "1"

    def __init__(self, schema: dict[str, Any] | bool | None = None, subset: object = None) -> None:
        if schema is None and subset is None:
            raise ValueError("json: give a schema, or the subset that must be in the answer")
        self._subset = subset
        self._validator = None
        if schema is not None:
            try:
                Draft202012Validator.check_schema(schema)
                _compile_patterns(schema)
            except SchemaError as error:
                raise ValueError(f"json: no JSON schema: {error.message}") from None
            self._validator = _Validator(schema, registry=Registry())

    async def score(self, trace: Trace, sandbox: Sandbox | None) -> float:
        """0.0 for what is not JSON and nothing else. Raises for a reference of the schema that leads nowhere."""
        try:
            value = read_json(trace.answer or "")
            fits = self._subset is None or contains(value, self._subset)
            return float(fits and (self._validator is None or self._validator.is_valid(value)))
        except (ValueError, RecursionError):
            return 0.0


def read_json(text: str) -> Any:
    """Strictly. Raises ValueError, or RecursionError for what is nested too deeply."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{len(text)} characters")
    return json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_once)


def contains(value: object, expected: object) -> bool:
    """True when `expected` is in `value`, as `Json` says."""
    if isinstance(expected, Mapping):
        return isinstance(value, Mapping) and all(k in value and contains(value[k], v) for k, v in expected.items())
    if isinstance(expected, list):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(contains(v, e) for v, e in zip(value, expected, strict=True))
        )
    return isinstance(value, bool) == isinstance(expected, bool) and value == expected


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is beyond a float")
    return number


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key is given twice")
    return made


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not re2.search(pattern, _utf8(instance)):
        yield ValidationError(f"does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, dict):
        for pattern, below in patterns.items():
            for key, value in instance.items():
                if re2.search(pattern, _utf8(key)):
                    yield from validator.descend(value, below, path=key, schema_path=pattern)


def _utf8(text: str) -> str:
    return text.encode(errors="replace").decode()


def _compile_patterns(schema: object) -> None:
    """Raises ValueError for a pattern that RE2 does not take, before any answer is in."""
    if isinstance(schema, dict):
        patterns = [schema.get("pattern"), *(schema.get("patternProperties") or {})]
        for pattern in patterns:
            if isinstance(pattern, str):
                try:
                    re2.compile(pattern)
                except re2.error:
                    raise ValueError(f"json: the schema's pattern {pattern!r} is not in RE2's syntax") from None
        for value in schema.values():
            _compile_patterns(value)
    elif isinstance(schema, list):
        for value in schema:
            _compile_patterns(value)


_Validator: Any = jsonschema.validators.extend(
    Draft202012Validator, {"pattern": _pattern, "patternProperties": _pattern_properties}
)
