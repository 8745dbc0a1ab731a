"""What schemathesis cannot know: how OTLP is written as protobuf, and which traces there are. See test_contract.py."""

from __future__ import annotations

import re
from typing import Any

import schemathesis
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.store.span_rows import imported

SENT = "1" * 32
KNOWN = ("own", "failed", imported("a").trace.id, SENT)
TRACE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
PROTOBUF = "application/x-protobuf"


def export(trace_id: bytes, span_id: bytes, name: str) -> bytes:
    """A request with one span. As one with logs it can be read, too: unknown fields are skipped."""
    made = ExportTraceServiceRequest()
    made.resource_spans.add().scope_spans.add().spans.add(trace_id=trace_id, span_id=span_id, name=name)
    return bytes(made.SerializeToString())


IDS, NAMES = st.binary(min_size=16, max_size=16), st.text(st.characters(codec="utf-8"), max_size=20)
schemathesis.openapi.media_type(
    PROTOBUF, st.just(b"") | st.builds(export, IDS, st.binary(min_size=8, max_size=8), NAMES)
)


@schemathesis.serializer(PROTOBUF)
def to_bytes(_: Any, value: Any) -> bytes:
    """What is no bytes was made to be wrong."""
    return value if isinstance(value, bytes) else str(value).encode()


@schemathesis.hook
def map_path_parameters(_: Any, path_parameters: Any) -> Any:
    """Ids that are there for most that could be: an unknown one is refused before all else is looked at."""
    given = (path_parameters or {}).get("trace_id")
    if isinstance(given, str) and TRACE_ID.fullmatch(given) and len(given) % 4:
        return {**path_parameters, "trace_id": KNOWN[len(given) % len(KNOWN)]}
    return path_parameters
