"""Limits the size and duration of every request body as it arrives, on every route.

The inflated size of a compressed body is limited in `inflate.py`.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentloop.api.refusals import OTLP

MAX_SENT = 8 << 20
"""Maximum bytes of an OTLP body as sent."""
GATES = "/api/v1/gates/"
"""Beginning of the path of a gate, whose outcomes are sent all at once: a body may be as large as one of OTLP."""
MAX_JSON = 1 << 20
"""Maximum bytes of any other body."""
BODY_S = 30.0
"""Maximum seconds from a route's first read of the body to the last byte."""


class BodyLimit:
    """ASGI middleware: a route that reads too many bytes, or for too long, gets an HTTPException 413 or 408."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_large = scope["path"] in OTLP or scope["path"].startswith(GATES)
        cap = MAX_SENT if is_large else MAX_JSON
        declared = Headers(scope=scope).get("content-length", "")
        n = 0
        ends_at = 0.0
        more = True

        async def bounded() -> Message:
            nonlocal n, ends_at, more
            # After the body only a disconnect can come, for which a streamed answer may wait for hours.
            if not more:
                return await receive()
            # Cut to 20 digits, because `int` refuses more than 4,300.
            if declared.isdecimal() and int(declared[:20]) > cap:
                raise HTTPException(413, f"a body of {declared[:20]} bytes; send at most {cap:,}")
            ends_at = ends_at or asyncio.get_running_loop().time() + BODY_S
            try:
                async with asyncio.timeout_at(ends_at):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body took more than {BODY_S:g} s; retry") from None
            n += len(message.get("body", b""))
            more = bool(message.get("more_body"))
            if n > cap:
                raise HTTPException(413, f"a body of more than {cap:,} bytes; send smaller batches")
            return message

        await self.app(scope, bounded, send)
