"""The gateway's routes: what an agent finds when it changes its base URL.

    /v1/chat/completions  /v1/responses  /v1/messages  /v1/messages/count_tokens  /v1/models  /v1/models/{name}
    /e/{episode}/v1/...          the same, as part of an episode
    x-agentloop-episode: ID      the same, by a header; or `KEY/e/ID` in place of the key

Plain ASGI, because a model's call should cost the gateway little. Whose call it is, whoever stands before it has said
in the request's state; alone, all calls are one project's.
"""

from __future__ import annotations

from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from agentloop.gateway.calls import Calls
from agentloop.gateway.dialects import chat, messages, responses
from agentloop.gateway.dialects.dialect import Dialect
from agentloop.gateway.exchange import Who, say
from agentloop.gateway.routes import NoRoute

DIALECTS: tuple[Dialect, ...] = (chat, messages, responses)
PATHS = {dialect.path: dialect for dialect in DIALECTS}
MODELS = "/v1/models"
COUNT = f"{messages.path}/count_tokens"
MODEL = f"{MODELS}/"
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
        elif scope["method"] == "POST" and path == COUNT:
            await self.calls.count(_who(scope), scope, receive, send)
        elif scope["method"] in ("GET", "HEAD") and path == MODELS:
            await say(send, 200, await self._models())
        elif scope["method"] in ("GET", "HEAD") and path.startswith(MODEL):
            await self._model(path.removeprefix(MODEL), scope, send)
        else:
            why = f"{scope['method']} {path} is not answered; POST calls, and GET {MODELS}"
            await say(send, 405, _dialect(path).error(405, why))

    async def _model(self, name: str, scope: Scope, send: Send) -> None:
        if await self.calls.offered.has(name):
            await say(send, 200, _told(name))
            return
        speaks = messages if "anthropic-version" in Headers(scope=scope) else chat
        why = await self.calls.offered.instead(NoRoute(f"no model {name!r} here", name))
        await say(send, 404, speaks.error(404, why))

    async def _models(self) -> dict[str, Any]:
        """The list, in words that clients of both families read."""
        names = await self.calls.offered.names()
        made = [_told(name) for name in names]
        ends = {"has_more": False, "first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return {"object": "list", "data": made, **ends}


def _told(name: str) -> dict[str, Any]:
    """One model, in words that clients of both families read."""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "owned_by": "agentloop",
    }


def route_of(scope: Scope) -> str | None:
    """The path of a call without the episode before it; None for what is not the gateway's."""
    path: str = scope["path"]
    if path.startswith(EPISODE):
        path = "/" + path[len(EPISODE) :].partition("/")[2]
    return path if path in PATHS or path in (MODELS, COUNT) or path.startswith(MODEL) else None


def dialect_of(scope: Scope) -> Dialect | None:
    """The dialect that a call is made in; None for what is none."""
    path = route_of(scope)
    return _dialect(path) if path is not None else None


def _dialect(path: str) -> Dialect:
    return messages if path == COUNT else PATHS.get(path, chat)


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
