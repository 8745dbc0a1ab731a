"""The gateway's routes: what an agent finds when it changes its base URL.

    /v1/chat/completions  /v1/responses  /v1/messages  /v1/models
    /e/{episode}/v1/...          the same, as part of an episode
    x-agentloop-episode: ID      the same, by a header; or `KEY/e/ID` in place of the key

Plain ASGI, because a model's call should cost the gateway little. Whose call it is, whoever stands before it has said
in the request's state; alone, all calls are one project's.
"""

from __future__ import annotations

from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from agentloop.gateway.calls import Calls, Who
from agentloop.gateway.dialects import chat, messages, responses
from agentloop.gateway.dialects.dialect import Dialect

DIALECTS: tuple[Dialect, ...] = (chat, messages, responses)
PATHS = {dialect.path: dialect for dialect in DIALECTS}
MODELS = "/v1/models"
EPISODE = "/e/"
HEADER = "x-agentloop-episode"
MAX_EPISODE = 200
PROJECT = "default"


class Gateway:
    """ASGI middleware: calls of models are answered here, all else by `app`."""

    def __init__(self, app: ASGIApp, calls: Calls) -> None:
        self.app, self.calls = app, calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        path = route_of(scope) if scope["type"] == "http" else None
        if path is None:
            await self.app(scope, receive, send)
        elif scope["method"] == "POST" and path in PATHS:
            who = _who(scope)
            if who.episode is not None and not 0 < len(who.episode) <= MAX_EPISODE:
                why = f"the name of an episode has 1 to {MAX_EPISODE} characters, not {len(who.episode)}"
                await say(send, 400, PATHS[path].error(400, why))
                return
            await self.calls.answer(PATHS[path], who, scope, receive, send)
        elif scope["method"] in ("GET", "HEAD") and path == MODELS:
            await say(send, 200, await self._models())
        else:
            why = f"{scope['method']} {path} is not answered; POST calls, and GET {MODELS}"
            await say(send, 405, PATHS.get(path, chat).error(405, why))

    async def _models(self) -> dict[str, Any]:
        """The list, in words that clients of both families read."""
        names = await self.calls.models()
        made = [
            {
                "id": name,
                "object": "model",
                "type": "model",
                "display_name": name,
                "created": 0,
                "owned_by": "agentloop",
            }
            for name in names
        ]
        ends = {"has_more": False, "first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return {"object": "list", "data": made, **ends}


def route_of(scope: Scope) -> str | None:
    """The path of a call without the episode before it; None for what is not the gateway's."""
    path: str = scope["path"]
    if path.startswith(EPISODE):
        path = "/" + path[len(EPISODE) :].partition("/")[2]
    return path if path in PATHS or path == MODELS else None


def dialect_of(scope: Scope) -> Dialect | None:
    """The dialect that a call is made in; None for what is none."""
    path = route_of(scope)
    return PATHS.get(path, chat) if path is not None else None


def _who(scope: Scope) -> Who:
    state = scope.get("state") or {}
    path: str = scope["path"]
    if path.startswith(EPISODE):
        episode: str | None = path[len(EPISODE) :].partition("/")[0]
    else:
        headers = Headers(scope=scope)
        episode = headers.get(HEADER) or (words_of(headers) or "").partition(EPISODE)[2] or None
    return Who(state.get("project", PROJECT), state.get("key"), episode)


def words_of(headers: Headers) -> str | None:
    """What stands where a key does, the episode behind it included; None where nothing does."""
    scheme, _, words = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return words.strip()
    return headers.get("x-api-key") or headers.get("authorization")


async def say(send: Send, status: int, found: dict[str, Any]) -> None:
    """Answer with `found` as JSON."""
    body = orjson.dumps(found)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
