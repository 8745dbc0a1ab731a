"""Quotes: a failure shows words that the trace really contains, never a paraphrase."""

from __future__ import annotations

from collections.abc import Iterator

from agentloop.types import Trace

MAX_QUOTE = 200
"""Characters kept of a quote; it is cut at the end, never in the middle."""


def quote(*texts: str | None) -> str:
    """The beginning of the first text that is not blank; "" when all are."""
    return next((text[:MAX_QUOTE] for text in texts if text and not text.isspace()), "")


def texts(trace: Trace) -> Iterator[str]:
    """Everything in a trace that may be quoted: messages, calls, results, the answer, the error."""
    for message in (*trace.messages, *(step.completion.message for step in trace.steps)):
        yield message.content
        for call in message.tool_calls:
            yield from (call.arguments, call.name, call.error or "")
    for step in trace.steps:
        yield from (result.content for result in step.results)
    yield trace.answer or ""
    yield trace.error or ""


def last_words(trace: Trace) -> str:
    """A quote for a failure of the whole: what the agent last said or did, else what it was asked."""
    for step in reversed(trace.steps):
        message = step.completion.message
        said = quote(message.content, *(call.arguments for call in message.tool_calls))
        if said:
            return said
    return quote(*(message.content for message in reversed(trace.messages)))
