"""Two traces side by side: folded, aligned again, marked."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from agentloop.store.store import Store
from agentloop.types import Step
from agentloop.views import comparison as comparison_view
from agentloop.views.comparison import TraceComparison, compare

from .stored import PROJECT, failure, put, put_as_spans, step, trace


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store.db")


def do(n: int, command: str, result: str = "ok") -> Step:
    return step(n, "", ("shell", f'{{"command": "{command}"}}', result))


def compared(store: Store, a: list[Step], b: list[Step]) -> TraceComparison:
    first = put(store, trace("a", *a))
    second = put(store, trace("b", *b))
    return compare(store, PROJECT, first, second)


def kinds(comparison: TraceComparison) -> list[tuple[str, int | None, int | None]]:
    return [(row.kind, row.a and row.a.step, row.b and row.b.step) for row in comparison.rows]


def test_equal_beginnings_are_folded_and_steps_align_again(store: Store) -> None:
    a = [do(0, "ls"), do(1, "cat a"), do(2, "wrong"), do(3, "test"), do(4, "end")]
    b = [do(0, "ls"), do(1, "cat a"), do(2, "right"), do(3, "more"), do(4, "test", "passed"), do(5, "end")]
    comparison = compared(store, a, b)
    assert kinds(comparison) == [
        ("fold", 0, 0), ("changed", 2, 2), ("only_b", None, 3), ("result", 3, 4), ("same", 4, 5),
    ]  # fmt: skip
    assert comparison.rows[0].n == 2
    assert comparison.first_difference == 1
    assert comparison.rows[1].is_first_difference
    assert comparison.sentence == "They part at step 2: B did something else."
    opened = compare(store, PROJECT, comparison.a.summary.id, comparison.b.summary.id, opened=[1])
    assert [row.kind for row in opened.rows][:2] == ["same", "same"]


def test_the_same_action_with_another_result_is_the_first_difference(store: Store) -> None:
    comparison = compared(store, [do(0, "ls", "a")], [do(0, "ls", "b")])
    assert kinds(comparison) == [("result", 0, 0)]
    assert comparison.sentence == "They part at step 0: the same action had another result."


def test_calls_that_differ_only_in_spacing_are_the_same(store: Store) -> None:
    comparison = compared(
        store, [step(0, "", ("shell", '{"a": 1, "b": 2}', "ok"))], [step(0, "x", ("shell", '{"b":2,"a":1}', "ok"))]
    )
    assert comparison.first_difference is None
    assert comparison.sentence == "Both did the same and got the same."


def test_one_that_stops_early_is_said_to(store: Store) -> None:
    comparison = compared(store, [do(0, "ls")], [do(0, "ls"), do(1, "cat")])
    assert comparison.sentence == "A stopped after step 0; the other went on."
    assert kinds(comparison) == [("same", 0, 0), ("only_b", None, 1)]


def test_spans_are_compared_with_steps(store: Store) -> None:
    one = trace("as spans", do(0, "ls"), do(1, "cat"))
    other = put(store, trace("as steps", do(0, "ls"), do(1, "dog")))
    comparison = compare(store, PROJECT, put_as_spans(store, one), other)
    assert [row.kind for row in comparison.rows] == ["same", "changed"]


def test_the_words_of_failures_are_marked_on_their_side(store: Store) -> None:
    a = put(store, trace("a", do(0, "ls", "no  such file")), failure(0, "no such file", critical=True))
    b = put(store, trace("b", do(0, "ls", "no  such file")), reward=1.0)
    row = compare(store, PROJECT, a, b).rows[0]
    assert row.a is not None
    assert row.b is not None
    assert any(part.mark for text in row.a.texts for part in text.parts)
    assert not any(part.mark for text in row.b.texts for part in text.parts)


def test_steps_are_read_for_the_first_comparison_only(store: Store) -> None:
    first, second = (
        put(store, trace(name, *[do(n, f"{name} {n}", "x" * 3000) for n in range(120)])) for name in ("p", "q")
    )
    sizes = []
    for start in (0, 50):
        tracemalloc.start()
        comparison = compare(store, PROJECT, first, second, start=start)
        sizes.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert [row.a and row.a.step for row in comparison.rows] == list(range(start, start + 25))
    assert sizes[1] < sizes[0] / 2


def test_a_comparison_is_made_anew_once_a_trace_grows(store: Store) -> None:
    one = put_as_spans(store, trace("as spans", do(0, "ls")))
    other = put(store, trace("as steps", do(0, "ls"), do(1, "dog")))
    assert compare(store, PROJECT, one, other).a.n_steps == 1
    longer = trace("as spans", do(0, "ls"), do(1, "dog"))
    assert put_as_spans(store, longer) == one
    assert compare(store, PROJECT, one, other).a.n_steps == 2


def test_a_trace_of_many_spans_is_compared_with_the_results_of_its_tools(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison_view, "MAX_WHOLE", 3)
    steps = [do(0, "ls", "a"), do(1, "cat", "b"), do(2, "end", "c")]
    one = put_as_spans(store, trace("as spans", *steps))
    label = failure(1, "b", critical=True)
    store.put_label(PROJECT, one, label)
    other = put(store, trace("as steps", *steps[:1], do(1, "cat", "other"), *steps[2:]))
    comparison = compare(store, PROJECT, one, other)
    assert kinds(comparison) == [("same", 0, 0), ("result", 1, 1), ("same", 2, 2)]
    row = comparison.rows[1].a
    assert row is not None
    assert [call.result and call.result.beginning for call in row.calls] == ["b"]
    assert any(part.mark for text in row.texts for part in text.parts)
