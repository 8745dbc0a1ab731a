"""What a client sends and is sent, over ASGI: bodies within bounds, answers, and refusals in its dialect's words."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson
from starlette.types import Receive, Scope, Send

from agentloop.gateway.dialects.dialect import Dialect
from agentloop.gateway.failures import Refusal, UpstreamFailed
from agentloop.gateway.record import Call
from agentloop.store.keys import Key

MAX_BODY = 32 << 20
"""Bytes of a request: a long conversation with images."""
WRITES_DEPTH, MAX_DEPTH = 254, 100
"""Levels of JSON that orjson writes; those that a request or an answer may have."""
MAX_HELD = 512 << 20
"""Bytes of all requests under way."""
BODY_S = 60.0
"""Seconds for the whole of it."""


class Refused(Exception):
    """What the client is told in its dialect's words."""

    def __init__(self, status: int, why: str, kind: str | None = None, retry_after: str | None = None) -> None:
        super().__init__(why)
        self.status, self.kind, self.retry_after = status, kind, retry_after


class Who(NamedTuple):
    """Whose call it is."""

    project: str
    key: Key | None
    episode: str | None
    task: str | None = None
    """What the run is an attempt at, as the client names it."""


def refused_as(upstream: str, error: Refusal | UpstreamFailed) -> Refused:
    """What the client is told of an upstream that gave no answer."""
    if isinstance(error, UpstreamFailed):
        return Refused(error.status, f"upstream {upstream!r} {error}")
    if error.status in (401, 402, 403):  # its words may repeat our key, and it is no fault of the client's
        return Refused(502, f"upstream {upstream!r} refuses this gateway ({error.status}); the trace says why")
    if not 400 <= error.status < 600:
        return Refused(502, f"upstream {upstream!r} answered {error.status}; is its base_url the one it redirects to?")
    return Refused(error.status, str(error), error.code, error.retry_after)


async def say(send: Send, status: int, found: dict[str, Any], *more: tuple[bytes, bytes]) -> None:
    """Answer with `found` as JSON. more: further headers."""
    body = orjson.dumps(found)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Reply:
    """What the client is sent."""

    def __init__(self, dialect: Dialect, send: Send) -> None:
        self._dialect, self._send = dialect, send
        self._started = False

    async def whole(self, body: bytes, call: Call) -> None:
        await self._start(200, b"application/json", call, (b"content-length", str(len(body)).encode()))
        await self._send({"type": "http.response.body", "body": body})

    async def piece(self, body: bytes, call: Call) -> None:
        if not self._started:
            await self._start(200, b"text/event-stream; charset=utf-8", call, (b"cache-control", b"no-cache"))
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes, call: Call) -> None:
        await self.piece(body, call)
        await self._send({"type": "http.response.body", "body": b""})

    async def refuse(self, refused: Refused, fail: Callable[[int, str], bytes] | None = None) -> None:
        """As an error of the dialect; within a stream as its last event."""
        if self._started and fail is not None:
            body = fail(refused.status, str(refused))
            await self._send({"type": "http.response.body", "body": body})
            return
        body = orjson.dumps(self._dialect.error(refused.status, str(refused), refused.kind))
        more = [(b"content-length", str(len(body)).encode())]
        if refused.retry_after is not None:
            more.append((b"retry-after", refused.retry_after.encode("latin-1", "replace")))
        await self._start(refused.status, b"application/json", None, *more)
        await self._send({"type": "http.response.body", "body": body})

    async def _start(self, status: int, kind: bytes, call: Call | None, *more: tuple[bytes, bytes]) -> None:
        self._started = True
        headers = [(b"content-type", kind), *more]
        if call is not None:
            headers.append((b"x-agentloop-trace", call.place.run.trace_id.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


class Room:
    """Bytes of bodies that are under way, of all calls together."""

    def __init__(self, most: int = MAX_HELD) -> None:
        self._most, self._held = most, 0

    def take(self, n: int) -> None:
        """Raises Refused when there is no room."""
        if self._held + n > self._most:
            raise Refused(503, "too much is under way; send it again", retry_after="1")
        self._held += n

    def give(self, n: int) -> None:
        """Those that are done with."""
        self._held -= n


async def body_of(receive: Receive, room: Room) -> bytes:
    """A whole body, which holds its room until that is given back. Raises Refused."""
    pieces, n, taken = [], 0, 0
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "the body was cut short")
                pieces.append(message.get("body", b""))
                if (n := n + len(pieces[-1])) > MAX_BODY:
                    raise Refused(413, f"a body of more than {MAX_BODY >> 20} MiB")
                room.take(n - taken)
                taken = n
                if not message.get("more_body"):
                    return b"".join(pieces)
    except BaseException as error:
        room.give(taken)
        if isinstance(error, TimeoutError):
            raise Refused(408, f"the body took more than {BODY_S:g} s") from None
        raise


def parsed(data: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise Refused(400, "the body is no JSON object")
    if is_deep(found):
        raise Refused(400, f"the body has JSON of more than {MAX_DEPTH} levels")
    return found


def is_deep(value: Any) -> bool:
    """Whether it has more levels than can be kept: orjson reads four times as many as it writes."""
    for _ in range(WRITES_DEPTH - MAX_DEPTH):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return True
    return False


def passed_on(scope: Scope) -> dict[str, str]:
    """Headers of the client's that are for the upstream."""
    return {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in scope["headers"]
        if name.startswith((b"anthropic-", b"openai-"))
    }


async def disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
