"""Who may do what: one place that every request passes before any route sees it.

A key is `al_<id>_<secret>`. The store has its id and the SHA-256 of the whole: the secret has 256
bits of chance, so a slow hash would protect nothing and cost every request. A key belongs to one
project (tenant) and has scopes.

Until the first key is made, the server answers programs of its own user on this machine, and only
requests that name it as `localhost` or by its loopback address: a web page that its user has open
elsewhere cannot reach it by a name of its own. They may send spans, call models and read. To judge
(reward, score, label, verdict) takes a key with the scope `judge`, or the token of `local.py`, so an
agent that can write its own trace cannot say what the trace is worth.
"""

from __future__ import annotations

import hashlib
import hmac
import os
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

from agentloop.api.connection import PEER_UID
from agentloop.api.local import TOKEN, LocalToken
from agentloop.api.peer import peer_uid
from agentloop.api.refusals import OTLP, refusal
from agentloop.errors import StoreError
from agentloop.gateway.app import EPISODE, route_of, words_of
from agentloop.store.keys import Key
from agentloop.store.tables import DEFAULT_PROJECT

INGEST, JUDGE, READ, CALL, ADMIN = "ingest", "judge", "read", "call", "admin"
SCOPES = {
    INGEST: "send spans and logs",
    JUDGE: "say what a trace is worth: scores, labels, rewards, resolutions",
    READ: "read and export traces",
    CALL: "call models",
    ADMIN: "everything, and `/metrics`, which counts all projects",
}
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
OPEN = {"/healthz", "/readyz", "/docs", "/openapi.json"}
"""What a load balancer asks without a key, and what says how to ask with one: no data is in it."""
FRESH_S = 5.0
"""How long a key that was looked up is believed, or that there is none: a revoked one may work that long."""
BROKEN_S = 5
"""Retry-After, when the store cannot say who may."""
WITH_KEY = "make one with `agentloop keys add`"
KEY = re.compile(r"al_([0-9a-f]{12})_[A-Za-z0-9_-]{43}")


class KeyStore(Protocol):
    """Where keys are kept."""

    def key(self, key_id: str) -> Key | None:
        """The key of that id, unless it was revoked."""
        ...

    def needs_key(self) -> bool:
        """Whether a key was ever made, revoked or not."""
        ...


def new_key(project: str, scopes: Iterable[str]) -> tuple[str, Key]:
    """(the key in words, which are shown once; what is kept of it)."""
    key_id = secrets.token_hex(6)
    words = f"al_{key_id}_{secrets.token_urlsafe(32)}"
    return words, Key(key_id, _digest(words), project, tuple(scopes))


class Guard:
    """ASGI middleware that refuses, or sets in the request's state `project`, `may_judge`, and `key` where one came."""

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyStore,
        token: LocalToken | None = None,
        clock: Callable[[], float] = time.monotonic,
        uid_of: Callable[[Scope], int | None] = peer_uid,
    ) -> None:
        """token: of this machine's user; None where there is none. uid_of: for what did not come by a `Connection`."""
        self.app, self._keys, self._token, self._clock, self._uid_of = app, keys, token, clock, uid_of
        self._cache: dict[str, tuple[float, Key | None]] = {}
        self._is_closed, self._checked_at = False, -FRESH_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self.app(scope, receive, send)
            return
        try:
            refused = await self._check(scope, Headers(scope=scope))
        except StoreError as error:
            refused = refusal(scope, 503, str(error), retry_s=BROKEN_S)
        if refused:
            await refused(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _check(self, scope: Scope, headers: Headers) -> Response | None:
        words = _words(headers)
        is_call = route_of(scope) is not None
        needed = CALL if is_call else needed_scope(scope["method"], scope["path"])
        if words is not None and TOKEN.fullmatch(words):
            return self._by_token(scope, headers, words)
        if words is None or (is_call and not KEY.fullmatch(words)):  # clients of models cannot send none
            return await self._by_user(scope, headers, needed)
        key = await self._find(words)
        if key is None:
            return refusal(scope, 401, "no such key, or it was revoked; `agentloop keys ls` shows those there are")
        if needed not in key.scopes and ADMIN not in key.scopes:
            why = f"this needs a key with the scope {needed!r}; key {key.id} has {', '.join(key.scopes)}"
            return refusal(scope, 403, why)
        may_judge = not {JUDGE, ADMIN}.isdisjoint(key.scopes)
        scope.setdefault("state", {}).update(project=key.project, key=key, may_judge=may_judge)
        return None

    def _by_token(self, scope: Scope, headers: Headers, words: str) -> Response | None:
        if self._token is None or not self._token.matches(words):
            why = "this is not the local token, or it was renewed; `agentloop keys rotate-local` says where it is"
            return refusal(scope, 401, why)
        if refused := self._check_origin(scope, headers):
            return refused
        scope.setdefault("state", {}).update(project=DEFAULT_PROJECT, may_judge=True)
        return None

    async def _by_user(self, scope: Scope, headers: Headers, needed: str) -> Response | None:
        if await self._needs_key():
            why = "this server wants a key: send `Authorization: Bearer al_...`; `agentloop keys add` makes one"
            return refusal(scope, 401, why)
        if refused := self._check_origin(scope, headers):
            return refused
        if needed == JUDGE:
            instead = f", or the token in {self._token.path}" if self._token else ""
            why = f"a judgement needs a key with the scope 'judge' (`agentloop keys add`){instead}"
            return refusal(scope, 403, why)
        scope.setdefault("state", {}).update(project=DEFAULT_PROJECT, may_judge=False)
        return None

    def _check_origin(self, scope: Scope, headers: Headers) -> Response | None:
        """403, unless the request comes from this machine and this user."""
        if not _is_local(headers):
            return refusal(scope, 403, "without a key only requests to localhost are answered; " + WITH_KEY)
        state = scope.get("state", {})
        uid = state[PEER_UID] if PEER_UID in state else self._uid_of(scope)
        if uid == os.geteuid():
            return None
        who = "cannot tell which user sent this" if uid is None else "another user sent this"
        return refusal(scope, 403, f"{who}; without a key only the service's own user is answered; {WITH_KEY}")

    async def _needs_key(self) -> bool:
        if not self._is_closed and self._clock() - self._checked_at >= FRESH_S:
            self._is_closed = await to_thread(self._keys.needs_key)
            self._checked_at = self._clock()
        return self._is_closed

    async def _find(self, words: str) -> Key | None:
        match = KEY.fullmatch(words)
        if match is None:
            return None
        looked_up, key = self._cache.get(match[1], (-FRESH_S, None))
        if self._clock() - looked_up >= FRESH_S:
            read_at = time.monotonic()
            key = await to_thread(self._keys.key, match[1])  # a store that is slow holds up nobody else
            if len(self._cache) > 10_000:  # ids that somebody made up
                self._cache.clear()
            key = key and key._replace(read_at=read_at)
            self._cache[match[1]] = (self._clock(), key)
        return key if key and hmac.compare_digest(key.sha256, _digest(words)) else None


def needed_scope(method: str, path: str) -> str:
    """The scope that a request needs; what nobody thought of needs `admin`."""
    if method == "POST" and path in OTLP:
        return INGEST
    if method == "PUT" and path.startswith("/api/v1/traces/"):
        return JUDGE
    if method in ("GET", "HEAD") and path.startswith("/api/v1/"):
        return READ
    return ADMIN


def _words(headers: Headers) -> str | None:
    words = words_of(headers)
    return words and words.partition(EPISODE)[0]


def _is_local(headers: Headers) -> bool:
    """Whether both the host that was asked and the page that asks are this machine."""
    named = [f"//{headers.get('host', '')}", *([headers["origin"]] if "origin" in headers else [])]
    try:
        return all(urlsplit(name).hostname in LOOPBACK for name in named)
    except ValueError:
        return False


def _digest(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()
