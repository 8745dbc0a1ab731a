"""What a request that is refused is answered with: one line, in the words of the protocol it came by.

OTLP has a google.rpc.Status in the encoding of the request, a call of a model its dialect's error; every other route
has `{"error": why}`.
"""

from __future__ import annotations

import json

from pydantic import BaseModel, Field
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from agentloop.gateway.app import dialect_of

PROTOBUF, JSON = "application/x-protobuf", "application/json"
OTLP = {"/v1/traces": "traces", "/v1/logs": "logs"}
"""Path -> what is sent there."""


class Refusal(BaseModel):
    """Why a request was refused."""

    error: str = Field(description="One line: what, which, and the next move.")


def content_type(headers: Headers) -> str:
    """Without its parameters, in lower case; empty where there is none."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def refusal(scope: Scope, code: int, why: str, *, retry_s: int | None = None) -> Response:
    """The answer to the request of `scope`. retry_s: seconds after which it may be sent again."""
    headers = {} if retry_s is None else {"Retry-After": str(retry_s)}
    if code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if code == 408:
        headers["Connection"] = "close"  # what is left of a body that drips in would be read for ever
    why = why.encode(errors="replace").decode()
    if (dialect := dialect_of(scope)) is not None:
        return JSONResponse(dialect.error(code, why), code, headers)
    if scope["path"] not in OTLP:
        return JSONResponse({"error": why}, code, headers)
    if content_type(Headers(scope=scope)) == JSON:
        return Response(json.dumps({"message": why}), code, headers, media_type=JSON)
    text = why.encode()
    return Response(b"\x12" + _varint(len(text)) + text, code, headers, media_type=PROTOBUF)  # field 2: the message


def _varint(n: int) -> bytes:
    digits = bytearray()
    while n > 0x7F:
        digits.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*digits, n])
