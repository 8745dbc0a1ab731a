"""Error responses: one line, in the format of the request's protocol.

OTLP gets a google.rpc.Status in the request's encoding, a call of a model gets its dialect's error, a browser gets a
page, and every other route gets `{"error": why}`.
"""

from __future__ import annotations

import json

from pydantic import BaseModel, Field
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from agentloop.api.pages.site import PageSite
from agentloop.gateway.app import dialect_of

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
OTLP = {"/v1/traces": "traces", "/v1/logs": "logs"}
"""Path of an OTLP route -> its signal."""


class Refusal(BaseModel):
    """Why a request was refused."""

    error: str = Field(description="One line: what, which, and the next move.")


def content_type(headers: Headers) -> str:
    """The content type without parameters, in lower case; empty if the header is missing."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def refusal(scope: Scope, code: int, why: str, *, retry_s: int | None = None) -> Response:
    """The error response to the request of `scope`. retry_s: seconds after which the client may retry."""
    headers = {} if retry_s is None else {"Retry-After": str(retry_s)}
    if code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if code == 408:
        headers["Connection"] = "close"  # otherwise the server would read the rest of a slow body for ever
    # The reason may quote half a surrogate pair from the request, which no encoding can send.
    why = why.encode(errors="replace").decode()
    if (dialect := dialect_of(scope)) is not None:
        return JSONResponse(dialect.error(code, why), code, headers)
    site: PageSite | None = scope.get("state", {}).get("site")
    if site is not None:
        page = site.draw_error(Request(scope), code, why)
        page.headers.update(headers)
        return page
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
