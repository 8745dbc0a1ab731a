"""The gateway's routes: what an agent finds when it changes its base URL.

    /v1/chat/completions  /v1/responses  /v1/messages  /v1/messages/count_tokens  /v1/models  /v1/models/{name}
    /e/{episode}/v1/...          the same, as part of an episode
    /e/{episode}/t/{task}/v1/... the same, as an attempt at a task
    x-agentloop-episode: ID, x-agentloop-task: ID    the same, by headers; or `KEY/e/ID/t/ID` in place of the key

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
EPISODE, TASK = "/e/", "t/"
HEADER, TASK_HEADER = "x-agentloop-episode", "x-agentloop-task"
MAX_NAME = 200
"""Characters of an episode's or a task's name."""
PROJECT = "default"
NO_WEBSOCKET = ((b"upgrade", b"HTTP/1.1"), (b"connection", b"close"))
"""Headers of a 426: the protocol that a call is made by, and that nothing else follows on this connection."""


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
            for what, name in (("an episode", who.episode), ("a task", who.task)):
                if name is not None and not 0 < len(name) <= MAX_NAME:
                    why = f"the name of {what} has 1 to {MAX_NAME} characters, not {len(name)}"
                    await say(send, 400, PATHS[path].error(400, why))
                    return
            await self.calls.answer(PATHS[path], who, scope, receive, send)
        elif scope["method"] == "POST" and path == COUNT:
            await self.calls.count(_who(scope), scope, receive, send)
        elif scope["method"] in ("GET", "HEAD") and path == MODELS:
            await say(send, 200, await self._models())
        elif scope["method"] in ("GET", "HEAD") and path.startswith(MODEL):
            await self._model(path.removeprefix(MODEL), scope, send)
        elif path in PATHS and _asks_for_websocket(scope):
            # Codex goes on by HTTP at once when it gets 426, and tries again five times when it gets anything else:
            # codex-rs/core/src/client.rs, `stream_responses_websocket`.
            why = f"{path} is not served by WebSocket; POST the call"
            await say(send, 426, PATHS[path].error(426, why), *NO_WEBSOCKET)
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
    """The path of a call without the episode and the task before it; None for what is not the gateway's."""
    path = _split(scope["path"])[2]
    return path if path in PATHS or path in (MODELS, COUNT) or path.startswith(MODEL) else None


def dialect_of(scope: Scope) -> Dialect | None:
    """The dialect that a call is made in; None for what is none."""
    path = route_of(scope)
    return _dialect(path) if path is not None else None


def _dialect(path: str) -> Dialect:
    return messages if path == COUNT else PATHS.get(path, chat)


def _asks_for_websocket(scope: Scope) -> bool:
    return scope["method"] == "GET" and Headers(scope=scope).get("upgrade", "").lower() == "websocket"


def _who(scope: Scope) -> Who:
    state = scope.get("state") or {}
    headers = Headers(scope=scope)
    episode, task, _ = _split(scope["path"])
    if episode is None:
        _, mark, names = (words_of(headers) or "").partition(EPISODE)
        episode, task, _ = _split(mark + names)
        episode = headers.get(HEADER) or episode or None
    task = headers.get(TASK_HEADER) if task is None else task
    return Who(state.get("project", PROJECT), state.get("key"), episode, task)


def _split(path: str) -> tuple[str | None, str | None, str]:
    """(episode, task, rest) of `/e/EPISODE/t/TASK/rest`; None for a name that is not there."""
    if not path.startswith(EPISODE):
        return None, None, path
    episode, _, rest = path[len(EPISODE) :].partition("/")
    if not rest.startswith(TASK):
        return episode, None, f"/{rest}"
    task, _, rest = rest[len(TASK) :].partition("/")
    return episode, task, f"/{rest}"


def words_of(headers: Headers) -> str | None:
    """What stands where a key does, the episode behind it included; None where nothing does."""
    scheme, _, words = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return words.strip()
    return headers.get("x-api-key") or headers.get("authorization")
