"""Two traces side by side: aligned by what was done, with equal beginnings folded and the first difference marked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from functools import cached_property, partial
from itertools import groupby
from typing import NamedTuple

from agentloop.errors import ConfigError
from agentloop.otel.repeats import canonical
from agentloop.otel.stored_trace import StoredTrace
from agentloop.protocols import ExportedTrace
from agentloop.store.steps import TraceHead
from agentloop.store.store import Store
from agentloop.store.tables import TraceRow, TraceSummary
from agentloop.types import Frozen, Verdict
from agentloop.views.cache import SizedCache
from agentloop.views.item_contents import ItemContent, TraceContents, step_contents
from agentloop.views.outline import TOOL, Outline, outline_of, stored_outline
from agentloop.views.trace_items import TraceItem, items_of
from agentloop.views.trace_page import FailureReader, MarkedFailure, ReadItems, TracePlace, first_words, summary_of

MAX_ROWS = 25
"""Rows of a window: a pair of steps, or a fold of equal ones."""
MAX_ALIGNED = 2_000
"""Steps of each trace, from the first difference on, that are aligned again; later ones stand side by side."""
MAX_WHOLE = 2_000
"""Spans up to which a trace is rebuilt as steps; a longer one is compared by its spans."""
MAX_SPANS = 20_000
"""Spans of a trace that can be compared: all its steps are read when it is compared for the first time."""
MAX_CACHED = 120_000
"""Pairs of all cached alignments together: about 15 MB."""
SAME, RESULT, CHANGED, ONLY_A, ONLY_B, FOLD = "same", "result", "changed", "only_a", "only_b", "fold"
"""Kinds of rows: all equal, another result of the same action, another action, a step of one side, several equal."""


class ComparedRow(Frozen):
    """Steps of both traces that stand beside each other."""

    index: int
    kind: str
    a: TraceItem | None = None
    b: TraceItem | None = None
    n: int = 1
    """Number of pairs that a fold stands for."""
    is_first_difference: bool = False


class ComparedTrace(Frozen):
    """One side."""

    summary: TraceSummary
    failures: tuple[MarkedFailure, ...]
    n_steps: int
    task: str
    """The first words of the user, on one line; empty if the trace does not have them."""


class TraceComparison(Frozen):
    """Two traces, and a window of their aligned steps."""

    a: ComparedTrace
    b: ComparedTrace
    sentence: str
    """How they differ."""
    n_equal: int
    """Steps from the first on that are the same in both."""
    n_rows: int
    start: int
    rows: tuple[ComparedRow, ...]
    first_difference: int | None
    """Index of the row; None for traces that did and got the same."""

    @property
    def end(self) -> int:
        """Index after the window."""
        return self.start + len(self.rows)


class _Pair(NamedTuple):
    """Positions in the two outlines that stand beside each other."""

    kind: str
    a: int | None
    b: int | None
    n: int = 1


class Alignment(NamedTuple):
    """How the steps of two traces stand beside each other."""

    n_equal: int
    sentence: str
    pairs: tuple[_Pair, ...]


ALIGNMENTS = SizedCache[Alignment](MAX_CACHED, lambda alignment: len(alignment.pairs))
"""Of this process: an alignment belongs to one state of both traces."""


class ComparedSide:
    """One trace while it is compared."""

    def __init__(self, summary: TraceSummary, outline: Outline, read: ReadItems, verdict: Verdict) -> None:
        self.summary = summary
        self.outline = outline
        self._read = read
        self._reader = FailureReader(outline, read, verdict.failures, verdict.scores)
        self.positions = [n for n, item in enumerate(outline.items) if item.step is not None]

    @cached_property
    def _steps(self) -> list[ItemContent]:
        return self._read(self.positions)

    @cached_property
    def actions(self) -> list[tuple[str, ...]]:
        """What was done in each step."""
        return [_did(step) for step in self._steps]

    @cached_property
    def results(self) -> list[tuple[tuple[str, bool], ...]]:
        """What each step got."""
        return [tuple((result.content, result.ok) for result in step.results) for step in self._steps]

    def items(self, positions: Sequence[int], limit: int | None) -> dict[int, TraceItem]:
        """The items at some positions, with the words of failures marked. limit: of `items_of`."""
        contents = dict(zip(positions, self._read(positions), strict=True))
        quotes, numbers = self._reader.marks(contents, TracePlace())
        listed = [(position, self.outline.items[position]) for position in positions]
        return {item.position: item for item in items_of(listed, list(contents.values()), quotes, numbers, limit)}

    @property
    def view(self) -> ComparedTrace:
        """Its facts."""
        # The task is in the first item of a trace with steps, and in the first call of one of spans.
        positions = sorted({0, *self.positions[:1]} if self.outline.items else set())
        task = next(filter(None, map(first_words, self._read(positions))), "")
        return ComparedTrace(
            summary=self.summary, failures=self._reader.failures, n_steps=len(self.positions), task=task
        )


def compare(
    store: Store, project: str, a: str, b: str, *, start: int = 0, opened: Sequence[int] = ()
) -> TraceComparison:
    """Two traces. start: index of the first row. opened: positions in A of the first steps of folds that are open.

    Raises NoSuchTrace, and ConfigError for a trace with too many spans.
    """
    rows = [store.row(project, trace_id) for trace_id in (a, b)]
    first, second = (_stored_side(store, row) for row in rows)
    # A trace that gets more spans has another `stored_at`, so its old alignment is never used again.
    state = (store.name, *((row.key, row.stored_at) for row in rows))
    alignment = ALIGNMENTS.get(state, lambda: align(first, second))
    return compare_sides(first, second, alignment, start=start, opened=opened, n_rows=MAX_ROWS)


def align(a: ComparedSide, b: ComparedSide) -> Alignment:
    """How their steps stand beside each other."""
    n_equal = _n_equal(a, b)
    return Alignment(n_equal, _sentence(a, b, n_equal), tuple(_aligned(a, b, n_equal)))


def compare_sides(
    a: ComparedSide,
    b: ComparedSide,
    alignment: Alignment,
    *,
    start: int = 0,
    opened: Sequence[int] = (),
    n_rows: int,
    limit: int | None = None,
) -> TraceComparison:
    """Two traces; see `compare`. n_rows: of the window. limit: characters of each text; default: those of a page."""
    pairs = list(_folded(alignment.pairs, {*opened}))
    different = next((n for n, pair in enumerate(pairs) if pair.kind not in (SAME, FOLD)), None)
    start = max(min(start, len(pairs) - 1), 0)
    window = pairs[start : start + n_rows]
    return TraceComparison(
        a=a.view,
        b=b.view,
        sentence=alignment.sentence,
        n_equal=alignment.n_equal,
        n_rows=len(pairs),
        start=start,
        rows=tuple(_rows(a, b, window, start, different, limit)),
        first_difference=different,
    )


def exported_side(stored: ExportedTrace) -> ComparedSide:
    """A side for a file."""
    head = TraceHead(stored.trace.model_dump(mode="json"), None, lambda part: None)
    outline = outline_of(head)
    summary = TraceSummary.model_validate(dict(stored.facts))
    return ComparedSide(summary, outline, partial(step_contents, head, outline), stored.verdict)


def _stored_side(store: Store, row: TraceRow) -> ComparedSide:
    verdict = store.verdict(row.project, row.id)
    if row.body is not None:
        outline = stored_outline(store, row)
        return ComparedSide(summary_of(row), outline, TraceContents(store, row, outline).read, verdict)
    if row.n_spans > MAX_SPANS:
        raise ConfigError(
            f"trace {row.id} has {row.n_spans:,} spans, more than the {MAX_SPANS:,} that can be compared; "
            "open it by itself"
        )
    if row.n_spans <= MAX_WHOLE:
        return exported_side(StoredTrace(store, summary_of(row)))
    outline = stored_outline(store, row)
    read = partial(_with_results, outline, TraceContents(store, row, outline).read)
    return ComparedSide(summary_of(row), outline, read, verdict)


def _with_results(outline: Outline, read: ReadItems, positions: Sequence[int]) -> list[ItemContent]:
    """The contents of some items; those of a model's call with the results of the tools that it called."""
    tools = {position: _tools_after(outline, position) for position in positions}
    listed = sorted({*positions, *(tool for after in tools.values() for tool in after)})
    contents = dict(zip(listed, read(listed), strict=True))
    return [
        contents[position]._replace(
            results=(
                *contents[position].results,
                *(result for tool in tools[position] for result in contents[tool].results),
            )
        )
        for position in positions
    ]


def _tools_after(outline: Outline, position: int) -> list[int]:
    """Positions of the calls of tools between a step and the next one."""
    items = outline.items
    if items[position].step is None:
        return []
    tools = []
    for n in range(position + 1, len(items)):
        if items[n].step is not None or items[n].depth < items[position].depth:
            break
        if items[n].kind == TOOL:
            tools.append(n)
    return tools


def _did(step: ItemContent) -> tuple[str, ...]:
    """What was done in a step: its calls; its words only if it has none."""
    calls = step.message.tool_calls
    if calls:
        return tuple(f"{call.name} {canonical(call.arguments)}" for call in calls)
    return ("", step.message.content.strip())


def _n_equal(a: ComparedSide, b: ComparedSide) -> int:
    n = 0
    for one, other in zip(zip(a.actions, a.results, strict=True), zip(b.actions, b.results, strict=True), strict=False):
        if one != other:
            break
        n += 1
    return n


def _aligned(a: ComparedSide, b: ComparedSide, n_equal: int) -> Iterator[_Pair]:
    """All steps: the equal ones, then those from the first difference on, beside each other where both do the same."""
    for n in range(n_equal):
        yield _Pair(SAME, a.positions[n], b.positions[n])
    end = n_equal + MAX_ALIGNED
    # `autojunk` would treat frequent actions of a long trace as noise. The matcher takes quadratic time at worst.
    matcher = SequenceMatcher(None, a.actions[n_equal:end], b.actions[n_equal:end], autojunk=False)
    for tag, from_a, to_a, from_b, to_b in matcher.get_opcodes():
        mine = range(n_equal + from_a, n_equal + to_a)
        theirs = range(n_equal + from_b, n_equal + to_b)
        if tag == "equal":
            yield from (_pair(a, b, i, j) for i, j in zip(mine, theirs, strict=True))
        else:
            yield from _beside(a, b, mine, theirs)
    yield from _beside(a, b, range(end, len(a.positions)), range(end, len(b.positions)))


def _beside(a: ComparedSide, b: ComparedSide, mine: range, theirs: range) -> Iterator[_Pair]:
    """Steps without counterparts, in pairs as far as both sides have some."""
    for i, j in zip(mine, theirs, strict=False):
        yield _pair(a, b, i, j)
    n = min(len(mine), len(theirs))
    yield from (_Pair(ONLY_A, a.positions[i], None) for i in mine[n:])
    yield from (_Pair(ONLY_B, None, b.positions[j]) for j in theirs[n:])


def _pair(a: ComparedSide, b: ComparedSide, i: int, j: int) -> _Pair:
    kind = CHANGED
    if a.actions[i] == b.actions[j]:
        kind = SAME if a.results[i] == b.results[j] else RESULT
    return _Pair(kind, a.positions[i], b.positions[j])


def _folded(pairs: Iterable[_Pair], opened: set[int]) -> Iterator[_Pair]:
    """Rows in which a run of equal pairs is one fold, unless the position of its first step is in `opened`."""
    for is_same, run in groupby(pairs, lambda pair: pair.kind == SAME):
        same = list(run)
        # A fold of one pair would take as much room as the pair.
        if is_same and len(same) > 1 and same[0].a not in opened:
            yield same[0]._replace(kind=FOLD, n=len(same))
        else:
            yield from same


def _rows(
    a: ComparedSide, b: ComparedSide, window: Sequence[_Pair], start: int, different: int | None, limit: int | None
) -> Iterator[ComparedRow]:
    items_a = a.items([pair.a for pair in window if pair.a is not None], limit)
    items_b = b.items([pair.b for pair in window if pair.b is not None], limit)
    for index, pair in enumerate(window, start=start):
        yield ComparedRow(
            index=index,
            kind=pair.kind,
            a=None if pair.a is None else items_a[pair.a],
            b=None if pair.b is None else items_b[pair.b],
            n=pair.n,
            is_first_difference=index == different,
        )


def _sentence(a: ComparedSide, b: ComparedSide, n_equal: int) -> str:
    n_a = len(a.positions)
    n_b = len(b.positions)
    if not n_a and not n_b:
        return "Neither has any step."
    if max(n_a, n_b) == n_equal:
        return "Both did the same and got the same."
    if min(n_a, n_b) == n_equal:
        name = "A" if n_a == n_equal else "B"
        if not n_equal:
            return f"{name} has no step."
        return f"{name} stopped after step {n_equal - 1}; the other went on."
    if a.actions[n_equal] == b.actions[n_equal]:
        return f"They part at step {n_equal}: the same action had another result."
    return f"They part at step {n_equal}: B did something else."
