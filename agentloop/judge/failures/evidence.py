"""Quotes: a failure shows words that the trace really contains, never a paraphrase."""

from __future__ import annotations

from collections.abc import Iterator

from agentloop.types import Message, Trace

MAX_QUOTE = 200
"""Characters kept of a quote; it is cut at the end, never in the middle."""
BEFORE = 60
"""Characters kept of the line before what was found in the middle of it."""


def quote(*texts: str | None) -> str:
    """The beginning of the first text that is not blank; "" when all are."""
    return next((text[:MAX_QUOTE] for text in texts if text and not text.isspace()), "")


def around(text: str, at: int) -> str:
    """The words of `text` from the line's beginning near `at`: part of the text as it stands."""
    start = max(text.rfind("\n", 0, at) + 1, at - BEFORE, 0)
    return text[start : start + MAX_QUOTE].rstrip()


def texts(trace: Trace) -> Iterator[str]:
    """Everything in a trace that may be quoted: messages, calls, results, the answer, the error; sub-agents', too."""
    waiting = [trace]
    while waiting:
        one = waiting.pop()
        for message in one.messages:
            yield from _said(message)
        for step in one.steps:
            for message in (*step.heard, step.completion.message):
                yield from _said(message)
            yield from (result.content for result in step.results)
        yield one.answer or ""
        yield one.error or ""
        waiting += [child.trace for child in one.children]


def last_words(trace: Trace) -> str:
    """A quote for a failure of the whole: what the agent last said or did, else what it was asked."""
    for step in reversed(trace.steps):
        message = step.completion.message
        said = quote(message.content, *(call.arguments for call in message.tool_calls))
        if said:
            return said
    return quote(*(message.content for message in reversed(trace.messages)))


def _said(message: Message) -> Iterator[str]:
    yield message.content
    yield message.reasoning
    for call in message.tool_calls:
        yield from (call.arguments, call.name, call.error or "")
