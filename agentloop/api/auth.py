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
from collections.abc import Callable, Iterable
from typing import Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from agentloop.store.keys import Key
from agentloop.store.tables import DEFAULT_PROJECT

INGEST, READ, ADMIN = "ingest", "read", "admin"
SCOPES = (INGEST, READ, ADMIN)
"""Write traces and scores; read and export them; delete them and whatever no other scope covers."""
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
OPEN = {"/healthz", "/readyz"}
"""What a load balancer asks without a key."""
FRESH_S = 5.0
"""How long a key that was looked up is believed: a revoked one may work that long."""
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
    """ASGI middleware that refuses, or sets `project` in the request's state."""

    def __init__(self, app: ASGIApp, keys: Keys, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._keys, self._clock = app, keys, clock
        self._known: dict[str, tuple[float, Key | None]] = {}
        self._needs_key = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        refused = self._refused(scope, Headers(scope=scope))
        if refused:
            await refused(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refused(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        words = _words(headers)
        if words is None:
            self._needs_key = self._needs_key or self._keys.n_keys() > 0
            if self._needs_key:
                return _no(
                    401, "this server wants a key: send `Authorization: Bearer al_...`; `agentloop keys add` makes one"
                )
            if not _is_local(headers):
                return _no(
                    403, "without keys only requests to localhost are answered; make one with `agentloop keys add`"
                )
            scope.setdefault("state", {})["project"] = DEFAULT_PROJECT
            return None
        key = self._find(words)
        if key is None:
            return _no(401, "no such key, or it was revoked; `agentloop keys ls` shows those there are")
        needed = needed_scope(scope["method"], scope["path"])
        if needed not in key.scopes and ADMIN not in key.scopes:
            return _no(403, f"this needs a key with the scope {needed!r}; key {key.id} has {', '.join(key.scopes)}")
        scope.setdefault("state", {})["project"] = key.project
        return None

    def _find(self, words: str) -> Key | None:
        match = KEY.fullmatch(words)
        if match is None:
            return None
        looked_up, key = self._known.get(match[1], (-FRESH_S, None))
        if self._clock() - looked_up >= FRESH_S:
            key = self._keys.key(match[1])
            if len(self._known) > 10_000:  # ids that somebody made up
                self._known.clear()
            self._known[match[1]] = (self._clock(), key)
        return key if key and hmac.compare_digest(key.sha256, _digest(words)) else None


def needed_scope(method: str, path: str) -> str:
    """The scope that a request needs; what nobody thought of needs `admin`."""
    if method == "POST" and path in ("/v1/traces", "/v1/logs"):
        return INGEST
    if method == "PUT" and path.startswith("/api/v1/traces/"):
        return INGEST
    if method in ("GET", "HEAD") and (path.startswith("/api/v1/") or path in ("/metrics", "/openapi.json", "/docs")):
        return READ
    return ADMIN


def _words(headers: Headers) -> str | None:
    scheme, _, words = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return words.strip()
    return headers.get("x-api-key") or headers.get("authorization")


def _is_local(headers: Headers) -> bool:
    """Whether both the host that was asked and the page that asks are this machine."""
    named = [f"//{headers.get('host', '')}", *([headers["origin"]] if "origin" in headers else [])]
    try:
        return all(urlsplit(name).hostname in LOOPBACK for name in named)
    except ValueError:
        return False


def _digest(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()


def _no(code: int, why: str) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if code == 401 else None
    return JSONResponse({"error": why}, code, headers)
