"""Trace and verdict <-> bytes: JSON, compressed lightly, since a trace repeats itself."""

from __future__ import annotations

import zlib

from agentloop.types import Trace, Verdict

_SEPARATOR = b"\n"


def pack(trace: Trace, verdict: Verdict) -> bytes:
    """Two lines of JSON (neither contains a line break), deflated at the fastest level."""
    lines = trace.model_dump_json().encode(), verdict.model_dump_json().encode()
    return zlib.compress(_SEPARATOR.join(lines), level=1)


def unpack(body: bytes) -> tuple[Trace, Verdict]:
    """The inverse of `pack`."""
    trace, verdict = zlib.decompress(body).split(_SEPARATOR)
    return Trace.model_validate_json(trace), Verdict.model_validate_json(verdict)
