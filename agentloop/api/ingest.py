"""`POST /v1/traces` and `/v1/logs`: OTLP over HTTP, answered once it is on disk.

The routes are plain ASGI handlers of Starlette, because they are called thousands of times a
second and their bodies are no JSON models. Status codes are those of the OTLP specification:
400 never to be retried, 413 and 415 likewise, 429 and 503 to be retried after `Retry-After`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from starlette.requests import Request
from starlette.responses import Response

from agentloop.api import inflate
from agentloop.api.committer import Busy, Committer
from agentloop.errors import FormatError, StoreError
from agentloop.formats import otlp

PROTOBUF, JSON = "application/x-protobuf", "application/json"
LARGE = 64 << 10
"""Bytes from which a body is decoded beside the event loop, so that others are answered meanwhile."""
BUSY_S, BROKEN_S = 1, 5
"""Retry-After, when the store is behind and when it fails."""

Decode = Callable[[bytes, str], otlp.Batch]


class Ingest:
    """The two routes; `project` of a request's state is whose traces they are."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer

    async def traces(self, request: Request) -> Response:
        """`POST /v1/traces`."""
        return await self._take(request, otlp.decode_traces, "spans")

    async def logs(self, request: Request) -> Response:
        """`POST /v1/logs`: messages that came as events of spans."""
        return await self._take(request, otlp.decode_logs, "log_records")

    async def _take(self, request: Request, decode: Decode, what: str) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in (PROTOBUF, JSON):
            return _refusal(415, f"content-type {kind!r}; {PROTOBUF} and {JSON} are read", PROTOBUF)
        declared = request.headers.get("content-length", "")
        try:
            body = await inflate.read(
                request.stream(),
                request.headers.get("content-encoding", ""),
                int(declared) if declared.isdecimal() else None,
            )
            if len(body) > LARGE:
                batch = await asyncio.to_thread(decode, body, kind)
            else:
                batch = decode(body, kind)
            await self._committer.put(request.state.project, batch.spans, len(body))
        except inflate.TooLarge as error:
            return _refusal(413, str(error), kind)
        except inflate.UnknownEncoding as error:
            return _refusal(415, str(error), kind)
        except FormatError as error:
            return _refusal(400, str(error), kind)
        except Busy as error:
            return _refusal(429, str(error), kind, BUSY_S)
        except StoreError as error:
            return _refusal(503, str(error), kind, BROKEN_S)
        return Response(_answer(what, batch, kind), 200, media_type=kind)


def _answer(what: str, batch: otlp.Batch, kind: str) -> bytes:
    """What was taken, and how many of `what` were not. Nothing is said when all were."""
    if kind == JSON:
        name = "rejectedSpans" if what == "spans" else "rejectedLogRecords"
        partial = {name: str(batch.n_rejected), "errorMessage": batch.problem} if batch.n_rejected else {}
        return json.dumps({"partialSuccess": partial} if partial else {}).encode()
    if what == "spans":
        traces = ExportTraceServiceResponse()
        if batch.n_rejected:
            traces.partial_success.rejected_spans = batch.n_rejected
            traces.partial_success.error_message = batch.problem
        return bytes(traces.SerializeToString())
    logs = ExportLogsServiceResponse()
    if batch.n_rejected:
        logs.partial_success.rejected_log_records = batch.n_rejected
        logs.partial_success.error_message = batch.problem
    return bytes(logs.SerializeToString())


def _refusal(code: int, why: str, kind: str, retry_s: int | None = None) -> Response:
    """A google.rpc.Status in the encoding of the request, as OTLP asks for; its one field here is `message`."""
    headers = {} if retry_s is None else {"Retry-After": str(retry_s)}
    if kind == JSON:
        return Response(json.dumps({"message": why}), code, headers, media_type=JSON)
    text = why.encode()
    return Response(b"\x12" + _varint(len(text)) + text, code, headers, media_type=PROTOBUF)


def _varint(n: int) -> bytes:
    made = bytearray()
    while n > 0x7F:
        made.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*made, n])
