"""Who may do what: one place that every request passes before any route sees it.

A key is `al_<id>_<secret>`. The store has its id and the SHA-256 of the whole: the secret has 256
bits of chance, so a slow hash would protect nothing and cost every request. A key belongs to one
project (tenant) and has scopes. Without any key the server serves this machine alone, and then
only requests that name it as `localhost` or by its loopback address: a web page that its user has
open elsewhere cannot reach it by a name of its own.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from asyncio import to_thread
from collections.abc import Callable, Iterable
from typing import Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from agentloop.api.refusals import OTLP, refusal
from agentloop.errors import StoreError
from agentloop.gateway.app import EPISODE, route_of, words_of
from agentloop.store.keys import Key
from agentloop.store.tables import DEFAULT_PROJECT

INGEST, READ, CALL, ADMIN = "ingest", "read", "call", "admin"
SCOPES = (INGEST, READ, CALL, ADMIN)
"""Write traces and scores; read and export them; call models; `/metrics`, which counts all projects, and what no other
covers."""
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
OPEN = {"/healthz", "/readyz", "/docs", "/openapi.json"}
"""What a load balancer asks without a key, and what says how to ask with one: no data is in it."""
FRESH_S = 5.0
"""How long a key that was looked up is believed, or that there is none: a revoked one may work that long."""
BROKEN_S = 5
"""Retry-After, when the store cannot say who may."""
KEY = re.compile(r"al_([0-9a-f]{12})_[A-Za-z0-9_-]{43}")


class Keys(Protocol):
    """Where keys are kept."""

    def key(self, key_id: str) -> Key | None:
        """The key of that id, unless it was revoked."""
        ...

    def n_keys(self) -> int:
        """How many there are."""
        ...


def new_key(project: str, scopes: Iterable[str]) -> tuple[str, Key]:
    """(the key in words, which are shown once; what is kept of it)."""
    key_id = secrets.token_hex(6)
    words = f"al_{key_id}_{secrets.token_urlsafe(32)}"
    return words, Key(key_id, _digest(words), project, tuple(scopes))


class Guard:
    """ASGI middleware that refuses, or sets `project` in the request's state, and `key` where there is one."""

    def __init__(self, app: ASGIApp, keys: Keys, clock: Callable[[], float] = time.monotonic) -> None:
        self.app, self._keys, self._clock = app, keys, clock
        self._known: dict[str, tuple[float, Key | None]] = {}
        self._needs_key, self._counted = False, -FRESH_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self.app(scope, receive, send)
            return
        try:
            refused = await self._refused(scope, Headers(scope=scope))
        except StoreError as error:
            refused = refusal(scope, 503, str(error), retry_s=BROKEN_S)
        if refused:
            await refused(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _refused(self, scope: Scope, headers: Headers) -> Response | None:
        words = _words(headers)
        is_call = route_of(scope) is not None
        if words is None or (is_call and not KEY.fullmatch(words)):  # clients of models cannot send none
            if await self._has_keys():
                why = "this server wants a key: send `Authorization: Bearer al_...`; `agentloop keys add` makes one"
                return refusal(scope, 401, why)
            if not _is_local(headers):
                why = "without keys only requests to localhost are answered; make one with `agentloop keys add`"
                return refusal(scope, 403, why)
            scope.setdefault("state", {})["project"] = DEFAULT_PROJECT
            return None
        key = await self._find(words)
        if key is None:
            return refusal(scope, 401, "no such key, or it was revoked; `agentloop keys ls` shows those there are")
        needed = CALL if is_call else needed_scope(scope["method"], scope["path"])
        if needed not in key.scopes and ADMIN not in key.scopes:
            why = f"this needs a key with the scope {needed!r}; key {key.id} has {', '.join(key.scopes)}"
            return refusal(scope, 403, why)
        scope.setdefault("state", {}).update(project=key.project, key=key)
        return None

    async def _has_keys(self) -> bool:
        if not self._needs_key and self._clock() - self._counted >= FRESH_S:
            self._needs_key = await to_thread(self._keys.n_keys) > 0
            self._counted = self._clock()
        return self._needs_key

    async def _find(self, words: str) -> Key | None:
        match = KEY.fullmatch(words)
        if match is None:
            return None
        looked_up, key = self._known.get(match[1], (-FRESH_S, None))
        if self._clock() - looked_up >= FRESH_S:
            read_at = time.monotonic()
            key = await to_thread(self._keys.key, match[1])  # a store that is slow holds up nobody else
            if len(self._known) > 10_000:  # ids that somebody made up
                self._known.clear()
            key = key and key._replace(read_at=read_at)
            self._known[match[1]] = (self._clock(), key)
        return key if key and hmac.compare_digest(key.sha256, _digest(words)) else None


def needed_scope(method: str, path: str) -> str:
    """The scope that a request needs; what nobody thought of needs `admin`."""
    if method == "POST" and path in OTLP:
        return INGEST
    if method == "PUT" and path.startswith("/api/v1/traces/"):
        return INGEST
    if method in ("GET", "HEAD") and path.startswith("/api/v1/"):
        return READ
    return ADMIN


def _words(headers: Headers) -> str | None:
    found = words_of(headers)
    return found and found.partition(EPISODE)[0]


def _is_local(headers: Headers) -> bool:
    """Whether both the host that was asked and the page that asks are this machine."""
    named = [f"//{headers.get('host', '')}", *([headers["origin"]] if "origin" in headers else [])]
    try:
        return all(urlsplit(name).hostname in LOOPBACK for name in named)
    except ValueError:
        return False


def _digest(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()
