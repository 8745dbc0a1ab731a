"""Regex, JSON and expected actions: the gold answer, wrong ones, none, and those that try to cheat or to stall."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from agentloop.judge.verifiers.actions import Actions
from agentloop.judge.verifiers.json import Json
from agentloop.judge.verifiers.regex import Regex
from agentloop.protocols import Verifier
from agentloop.types import StopReason

from .scenes import Turn, garbled, missing, shell, submit, trace


def value(verifier: Verifier, answer: str | None) -> Any:
    stop = StopReason.step_limit if answer is None else StopReason.submitted
    return asyncio.run(verifier.score(trace([], stop_reason=stop).model_copy(update={"answer": answer}), None))


@pytest.mark.parametrize(
    ("pattern", "answer", "expected"),
    [
        (r"\d{4}-\d\d-\d\d", "2026-01-31", 1.0),
        (r"\d{4}-\d\d-\d\d", " 2026-01-31\n", 1.0),
        (r"\d{4}-\d\d-\d\d", "on 2026-01-31", 0.0),
        (r"\d{4}-\d\d-\d\d", "2026-01-31\nor 2026-02-01", 0.0),
        (r"(?i)paris", "PARIS", 1.0),
        (r".*", None, 0.0),
        (r".*", "", 1.0),
        (r".+", "\ud800", 1.0),
    ],
)
def test_a_regex_matches_the_whole_answer(pattern: str, answer: str | None, expected: float) -> None:
    assert value(Regex(pattern), answer) == expected


def test_a_regex_searches_where_it_is_told_to() -> None:
    assert value(Regex(r"\b42\b", search=True), "it is 42.") == 1.0
    assert value(Regex(r"\b42\b", search=True), "it is 142.") == 0.0


@pytest.mark.parametrize("make", [Regex, lambda p: Json(schema={"type": "string", "pattern": p})])
def test_no_answer_makes_a_pattern_slow(make: Callable[[str], Verifier]) -> None:
    """Python's own engine needs some 2**30 steps for this one."""
    verifier = make(r"^(a+)+$")
    started = time.process_time()
    answer = "a" * 50_000 + "!"
    assert value(verifier, answer if isinstance(verifier, Regex) else json.dumps(answer)) == 0.0
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize("pattern", ["(", r"(a)\1", "(?=a)", "a{5000}"])
def test_a_pattern_that_is_none_is_refused_before_any_answer(pattern: str) -> None:
    with pytest.raises(ValueError, match="RE2"):
        Regex(pattern)
    with pytest.raises(ValueError, match=r"RE2|no JSON schema"):
        Json(schema={"properties": {"x": {"pattern": pattern}}})


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('{"name": "Ann", "age": 3}', 1.0),
        ('{"name": "Ann"}', 1.0),
        ('{"age": 3}', 0.0),
        ('{"name": "Ann", "age": -1}', 0.0),
        ('{"name": "Ann", "admin": true}', 0.0),
        ('{"name": "Ann"} ', 1.0),
        ('{"name": "Ann"} {"name": "Bob"}', 0.0),
        ('{"name": "Ann", "name": "Bob"}', 0.0),
        ('{"name": "Ann", "age": NaN}', 0.0),
        ('{"name": "Ann", "age": 1e999}', 0.0),
        ('{"name": "Ann", "age": ' + "9" * 5000 + "}", 0.0),
        ("[" * 100_000, 0.0),
        ('"' + "x" * (1 << 21) + '"', 0.0),
        ("name: Ann", 0.0),
        ("", 0.0),
        (None, 0.0),
    ],
)
def test_json_of_a_schema(answer: str | None, expected: float) -> None:
    assert value(Json(schema=PERSON), answer) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"a": 1, "b": {"c": [1, 2]}, "more": 0}, 1.0),
        ({"a": 1.0, "b": {"c": [1, 2], "d": 0}}, 1.0),
        ({"a": True, "b": {"c": [1, 2]}}, 0.0),
        ({"a": 1, "b": {"c": [1, 2, 3]}}, 0.0),
        ({"a": 1, "b": {"c": [2, 1]}}, 0.0),
        ({"a": 1}, 0.0),
        ([], 0.0),
    ],
)
def test_json_with_a_subset(answer: object, expected: float) -> None:
    assert value(Json(subset={"a": 1, "b": {"c": [1, 2]}}), json.dumps(answer)) == expected


def test_a_schema_reaches_nothing_outside_itself() -> None:
    """A remote reference is never fetched: the reward is then unscored, because it raises."""
    verifier = Json(schema={"$ref": "http://127.0.0.1:9/x.json"})
    with pytest.raises(Exception, match="Unresolvable"):
        value(verifier, "{}")


@pytest.mark.parametrize("options", [{}, {"schema": {"type": "strin"}}, {"schema": 7}])
def test_json_needs_something_to_look_for(options: Any) -> None:
    with pytest.raises(ValueError, match="json: "):
        Json(**options)


A, B = {"name": "shell", "arguments": {"command": "a"}}, {"name": "shell", "arguments": {"command": "b"}}
ANY = {"name": "shell"}
a, b, c = shell("a"), shell("b"), shell("c")


@pytest.mark.parametrize(
    ("expected", "match", "turns", "worth"),
    [
        ([A, B], "exact", [a, b, submit("")], 1.0),
        ([A, B], "exact", [a, c, b], 0.0),
        ([A, B], "exact", [b, a], 0.0),
        ([A, B], "ordered", [a, c, b], 1.0),
        ([A, B], "ordered", [b, a], 0.0),
        ([A, B], "subset", [b, c, a], 1.0),
        ([A, A], "subset", [a, b], 0.0),
        ([ANY, A], "subset", [a, b], 1.0),
        ([A, ANY], "subset", [b, a], 1.0),
        ([A], "ordered", [missing("a")], 0.0),
        ([A], "ordered", [garbled('{"command": "a"}')], 0.0),
        ([A], "ordered", [Turn("shell", '{"command":"a"}')], 1.0),
        ([A], "ordered", [Turn("shell", '{"command": "a", "command": "b"}', content="", exit_code=0)], 0.0),
        ([A], "ordered", [Turn("shell", '{"command": "a", "sudo": true}', content="", exit_code=0)], 0.0),
        ([A], "ordered", [], 0.0),
        ([], "exact", [], 1.0),
        ([], "exact", [a], 0.0),
    ],
)
def test_expected_actions(expected: list[Any], match: Any, turns: list[Turn], worth: float) -> None:
    assert asyncio.run(Actions(expected, match).score(trace(turns), None)) == worth


@pytest.mark.parametrize(
    ("expected", "match"), [([{"tool": "shell"}], "exact"), ([{"name": "x", "args": {}}], "exact"), ([], "sorted")]
)
def test_expected_actions_that_are_none_are_refused(expected: Any, match: Any) -> None:
    with pytest.raises(ValueError, match="actions: "):
        Actions(expected, match)
