"""Failed attempts -> evidence by component: what went wrong, where, in quoted words, and what people say.

A failure belongs to the description of the tool whose call went wrong, and to the instructions where no call did. Words
of verifiers are left out: they may quote the expected answer.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from agentloop.abilities import words_of_people
from agentloop.failures.taxonomy import OURS
from agentloop.types import Attempt, FailureType, Judged, Step, ToolCall, ToolResult, Trace, Verdict
from agentloop.types.overlay import INSTRUCTIONS, TOOL

MAX_SHOWN = 12
"""Pieces of evidence in one request."""
MAX_WORDS = 400
"""Characters of one quoted text."""
HUMAN = "human"
OURSELVES = ("judge", "import")
"""Sources of scores that are no people."""


@dataclass(frozen=True)
class Evidence:
    """One failure, as a rewriter is shown it."""

    component: str
    type: str
    trace_id: str
    step: int | None
    instruction: str
    quotes: tuple[str, ...]
    """Words of the trace or of a person."""


def evidence_of(attempt: Attempt | Judged, names: Iterable[str], feedback: Sequence[str] = ()) -> list[Evidence]:
    """Everything that went wrong in an attempt, by the component of `names` that may mend it; none for a success.

    feedback: what people wrote about it.
    """
    verdict = attempt.verdict
    trace = attempt.trace
    if verdict.reward is None or verdict.reward >= 1:
        return []
    components = set(names)
    first = next((message.content for message in trace.messages if message.role == "user"), "")
    evidence: list[Evidence] = []
    for failure in verdict.failures:
        if failure.type.is_infra:
            continue
        call, result = _call_at(trace, failure.step)
        name = _component(call, components)
        quotes = (failure.evidence, *_words_of(call, result))
        evidence.append(Evidence(name, failure.type.value, trace.id, failure.step, first, quotes))
    for words in dict.fromkeys((*_of_people(verdict), *feedback)):
        evidence.append(Evidence(_mentioned(words, components), "people", trace.id, None, first, (words,)))
    if not evidence:
        answer = trace.answer or trace.error or ""
        kind = FailureType.unclassified.value
        evidence.append(Evidence(_fallback(components), kind, trace.id, None, first, (answer,)))
    return evidence


def stored_evidence(stored: Iterable[Judged], names: Collection[str], experience: object) -> list[Evidence]:
    """Everything that went wrong in stored traces, with the feedback on each that `experience` has."""
    return [each for judged in stored for each in evidence_of(judged, names, words_of_people(experience, judged.trace))]


def by_component(evidence: Iterable[Evidence]) -> dict[str, list[Evidence]]:
    """Evidence by component, the component with the most of it first."""
    grouped: defaultdict[str, list[Evidence]] = defaultdict(list)
    for each in evidence:
        grouped[each.component].append(each)
    return dict(sorted(grouped.items(), key=lambda item: (-len(item[1]), item[0])))


def clusters(evidence: Iterable[Evidence]) -> list[tuple[str, int, str]]:
    """(type, number of traces, a quote) of each type of failure, the commonest first."""
    traces: defaultdict[str, set[str]] = defaultdict(set)
    quotes: dict[str, str] = {}
    for each in evidence:
        traces[each.type].add(each.trace_id)
        quotes.setdefault(each.type, each.quotes[0] if each.quotes else "")
    counts = Counter({kind: len(ids) for kind, ids in traces.items()})
    return [(kind, n, quotes[kind]) for kind, n in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]


def described(evidence: Sequence[Evidence]) -> str:
    """Evidence as text. Each line of a trace begins with `| `, so that no trace can end the quotation."""
    counts = Counter(each.type for each in evidence)
    lines: list[str] = []
    for kind, n in counts.most_common():
        if kind == "people":
            lines.append(f"People wrote about {n} of the attempts:")
        else:
            lines.append(f"{kind} in {n} of the attempts: {OURS.describe(FailureType(kind))}")
        for each in _distinct(evidence, kind)[: max(1, MAX_SHOWN // len(counts))]:
            where = "in the whole attempt" if each.step is None else f"at step {each.step}"
            lines.append(f"- {where}; the task began:")
            lines += _quoted(each.instruction)
            lines.append("  the trace has:")
            for quote in each.quotes:
                lines += _quoted(quote)
    return "\n".join(lines)


def _distinct(evidence: Sequence[Evidence], kind: str) -> list[Evidence]:
    """Evidence of one type, each set of quotes once."""
    distinct: dict[tuple[str, ...], Evidence] = {}
    for each in evidence:
        if each.type == kind:
            distinct.setdefault(each.quotes, each)
    return list(distinct.values())


def _quoted(text: str) -> list[str]:
    return [f"| {line}" for line in text[:MAX_WORDS].splitlines() if line.strip()]


def _call_at(trace: Trace, step: int | None) -> tuple[ToolCall | None, ToolResult | None]:
    """The call at a step that went wrong, else the step's first one."""
    place: Step | None = next((each for each in trace.steps if each.index == step), None)
    if place is None or not place.calls:
        return None, None
    wrong = [(call, result) for call, result in place.calls if result is not None and not result.ok]
    return (wrong or place.calls)[0]


def _words_of(call: ToolCall | None, result: ToolResult | None) -> tuple[str, ...]:
    if call is None:
        return ()
    words = (f"call: {call.name}({call.arguments})",)
    if result is None:
        return words
    return (*words, f"result: {result.content}")


def _component(call: ToolCall | None, names: set[str]) -> str:
    if call is not None and f"{TOOL}{call.name}" in names:
        return f"{TOOL}{call.name}"
    return _fallback(names)


def _fallback(names: set[str]) -> str:
    """The instructions, whole or the first section of them."""
    sections = sorted(name for name in names if name.partition(".")[0] == INSTRUCTIONS)
    return sections[0] if sections else min(names, default=INSTRUCTIONS)


def _of_people(verdict: Verdict) -> list[str]:
    """What people wrote. Other verifiers' words may hold the expected answer."""
    return [
        score.why
        for score in verdict.scores
        if score.why and (score.verifier == HUMAN or score.source not in (None, *OURSELVES))
    ]


def _mentioned(words: str, names: set[str]) -> str:
    """The tool that `words` name, else the instructions."""
    tools = sorted(name for name in names if name.startswith(TOOL) and _has_word(words, name.removeprefix(TOOL)))
    return tools[0] if tools else _fallback(names)


def _has_word(words: str, name: str) -> bool:
    """Whether `words` have a tool's name as a whole word, so that `pay` is not seen in `repay`."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", words, re.IGNORECASE) is not None


def transcript(attempt: Attempt) -> str:
    """The calls, results and answer of an attempt as text."""
    lines: list[str] = []
    for step in attempt.trace.steps:
        for call, result in step.calls:
            lines += _quoted(f"call: {call.name}({call.arguments})")
            if result is not None:
                lines += _quoted(f"result: {result.content}")
    return "\n".join([*lines, *_quoted(f"answer: {attempt.trace.answer}")])
