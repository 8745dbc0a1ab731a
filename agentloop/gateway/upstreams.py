"""Asking an upstream, over connections that are kept.

aiohttp, because a call with it costs a third of what httpx takes (`benchmarks/client.py` measures both). What is
tried again is only what never reached the upstream; a 429 or 5xx goes to the client, whose library knows what to do.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from fnmatch import fnmatchcase

import aiohttp
import orjson

from agentloop.gateway import hosted, policy_upstream
from agentloop.gateway.failures import Refusal, UpstreamFailed
from agentloop.gateway.routes import Upstream
from agentloop.policies.openai import proxy_of

CONNECT_S, KEPT_S = 5.0, 3.0
"""For a connection; how long one that is idle is kept: shorter than servers keep theirs, who else close it under us."""
TRIES, BACK_OFF_S = 3, 0.2
MAX_ANSWER = 64 << 20
"""Bytes of an answer, streamed or not, and of the words of a refusal."""
ASKED_S = 30.0
"""How long an upstream that does not say which server it is is not asked again."""


class Answer:
    """What an upstream says, as it comes."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def whole(self) -> bytes:
        """All of it."""
        return b"".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncGenerator[bytes]:
        """As they arrive. Raises UpstreamFailed, for an answer that is too long, too."""
        n = 0
        with _explained():
            async for piece in self._response.content.iter_any():
                if (n := n + len(piece)) > MAX_ANSWER:
                    raise UpstreamFailed("too_large", f"sent an answer of more than {MAX_ANSWER >> 20} MiB")
                yield piece


Said = Answer | hosted.HostedAnswer | policy_upstream.PolicyAnswer


class Upstreams:
    """The connections of one event loop."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._proxies: dict[str, str | None] = {}
        self._kinds: dict[str, tuple[bool, float]] = {}
        """Upstream -> whether it gives tokens, and until when that is believed."""

    @asynccontextmanager
    async def ask(self, upstream: Upstream, path: str, body: bytes, headers: dict[str, str]) -> AsyncIterator[Said]:
        """Post `body`. Raises Refusal for an error that the upstream answers, and UpstreamFailed."""
        if upstream.via == "litellm":
            async with aclosing(await hosted.ask(upstream, body)) as given:
                yield given
            return
        if upstream.via == "policy":
            yield await policy_upstream.ask(upstream, body)
            return
        response = await self._post(upstream, path, body, headers)
        try:
            if response.status >= 300:
                said = await Answer(response).whole()
                raise Refusal(response.status, said, response.headers.get("Retry-After"))
            yield Answer(response)
        finally:
            response.close() if not response.content.is_eof() else response.release()

    async def gives_tokens(self, upstream: Upstream) -> bool:
        """Whether it gives exact tokens; asked once, of its list of models, where nobody said."""
        if upstream.gives_tokens is not None or upstream.via != "http":
            return bool(upstream.gives_tokens)
        gives, until = self._kinds.get(upstream.name, (False, 0.0))
        if time.monotonic() >= until:
            try:
                gives = b'"owned_by":"vllm"' in (await self._models(upstream)).replace(b" ", b"")
                until = math.inf
            except UpstreamFailed as failed:
                if failed.kind != "no_list":  # it may be starting; the call itself will say what is wrong
                    return False
                gives, until = False, time.monotonic() + ASKED_S
            self._kinds[upstream.name] = (gives, until)
        return gives

    async def models(self, upstream: Upstream) -> list[str]:
        """Names of the models that it says it has and answers for; none when it does not say."""
        if upstream.via != "http":
            return []
        try:
            found = orjson.loads(await self._models(upstream)).get("data") or []
            names = [each["id"] for each in found]
        except (UpstreamFailed, ValueError, AttributeError, KeyError, TypeError):
            return []
        return [name for name in names if any(fnmatchcase(name, pattern) for pattern in upstream.models)]

    async def problem(self, upstream: Upstream) -> str | None:
        """Why it cannot be asked now; None where it can, or only a call would tell."""
        try:
            if upstream.via == "http":
                await self._models(upstream)
        except UpstreamFailed as failed:
            return None if failed.kind == "no_list" else str(failed)
        return None

    async def _models(self, upstream: Upstream) -> bytes:
        timeout = aiohttp.ClientTimeout(total=CONNECT_S)
        with _explained():
            async with self._open().get(
                f"{upstream.base_url}/models",
                headers=_headers(upstream, {}),
                timeout=timeout,
                allow_redirects=False,
                proxy=self._proxy(upstream),
            ) as found:
                if found.status != 200:
                    kind = "no_list" if found.status < 500 else "unreachable"
                    raise UpstreamFailed(kind, f"answered {found.status} for its models")
                return await found.read()

    async def close(self) -> None:
        """End the connections."""
        if self._session is not None:
            await self._session.close()

    async def _post(
        self, upstream: Upstream, path: str, body: bytes, headers: dict[str, str]
    ) -> aiohttp.ClientResponse:
        session = self._open()
        timeout = aiohttp.ClientTimeout(total=upstream.timeout_s, sock_connect=CONNECT_S, sock_read=upstream.silent_s)
        for attempt in range(TRIES):
            try:
                with _explained():
                    return await session.post(
                        f"{upstream.base_url}{path}",
                        data=body,
                        headers=_headers(upstream, headers),
                        timeout=timeout,
                        allow_redirects=False,
                        proxy=self._proxy(upstream),
                    )
            except UpstreamFailed as failed:
                # Closed before a byte of an answer, as a kept connection is that the upstream closed meanwhile. If it
                # was asked after all, a model that is asked twice costs tokens and nothing else.
                was_closed = attempt == 0 and isinstance(failed.__cause__, aiohttp.ServerDisconnectedError)
                if attempt + 1 == TRIES or not (was_closed or failed.kind == "unreachable"):
                    raise
                await asyncio.sleep(BACK_OFF_S * 2**attempt)
        raise AssertionError("unreachable")

    def _proxy(self, upstream: Upstream) -> str | None:
        if upstream.base_url not in self._proxies:
            self._proxies[upstream.base_url] = proxy_of(upstream.base_url)
        return self._proxies[upstream.base_url]

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=True)
        return self._session


def _headers(upstream: Upstream, passed_on: dict[str, str]) -> dict[str, str]:
    made = {"content-type": "application/json", **passed_on}
    if upstream.api_key:
        made["authorization"] = f"Bearer {upstream.api_key}"
        if "messages" in upstream.dialects:
            made["x-api-key"] = upstream.api_key
            made.setdefault("anthropic-version", "2023-06-01")
    return made


class _explained:
    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            raise UpstreamFailed("unreachable", f"cannot be reached ({error})") from error
        if isinstance(error, TimeoutError):
            raise UpstreamFailed("silent", "said nothing for too long, or took too long", 504) from error
        if isinstance(error, aiohttp.ClientError | OSError):
            raise UpstreamFailed("broken_off", f"broke off ({type(error).__name__}: {error})") from error
