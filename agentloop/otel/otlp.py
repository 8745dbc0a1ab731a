"""OTLP/HTTP: what OpenTelemetry exporters send, as rows of the store.

A span that cannot be kept is left out by itself and counted; its neighbours stay. What is over a limit
(`otlp_limits.py`) is left out of its span, and counted too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from agentloop.errors import FormatError
from agentloop.otel import otlp_json, otlp_protobuf
from agentloop.otel.genai import Said, Where, event_of, span_of
from agentloop.otel.otlp_limits import MAX_ITEMS, Lost
from agentloop.types import Span

PROTOBUF, JSON = "application/x-protobuf", "application/json"


class Batch(NamedTuple):
    """What one request held."""

    spans: list[Span]
    n_rejected: int = 0
    problem: str = ""
    """Why the first of those that were rejected was, and what was left out of others; empty when all is there."""
    dropped: Mapping[str, int] = MappingProxyType({})
    """`attributes`, `events`, `links`, `values` over a limit -> how many."""


def decode_traces(body: bytes, content_type: str) -> Batch:
    """The spans of an ExportTraceServiceRequest. Raises FormatError when it is none at all."""
    reader = otlp_json if _is_json(content_type) else otlp_protobuf
    lost = Lost()
    return _batch(reader.spans(body, lost), span_of, lost)


def decode_logs(body: bytes, content_type: str) -> Batch:
    """The records of an ExportLogsServiceRequest that were said within a trace, as rows of kind `event`.

    Raises FormatError when it is none at all.
    """
    reader = otlp_json if _is_json(content_type) else otlp_protobuf
    seen: Counter[tuple[str, str]] = Counter()

    def make(said: Said, where: Where) -> Span:
        key = (said.trace_id, repr(said))
        seen[key] += 1
        return event_of(said, where, nth=seen[key] - 1)

    lost = Lost()
    return _batch(reader.logs(body, lost), make, lost)


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in (PROTOBUF, JSON):
        raise FormatError(f"content type {content_type[:80]!r}: neither {PROTOBUF} nor {JSON}")
    return kind == JSON


def _batch(found: Iterator[tuple[Said | ValueError, Where]], make: Callable[[Said, Where], Span], lost: Lost) -> Batch:
    spans: list[Span] = []
    n_rejected, problem = 0, ""
    for said, where in found:
        try:
            if isinstance(said, ValueError):
                raise said
            spans.append(make(said, where))
        except ValueError as error:
            n_rejected += 1
            problem = problem or str(error)
    if lost.n_items:
        n_rejected += lost.n_items
        problem = problem or f"more than {MAX_ITEMS:,} in one request; send smaller batches"
    told = "; ".join(words for words in (problem, lost.told and f"left out: {lost.told}") if words)
    return Batch(spans, n_rejected, told, dict(lost.n))
