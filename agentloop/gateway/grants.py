"""Episodes of this process that may ask through the gateway, each by a token in its path, `/e/{token}/v1/...`.

The token is all that an agent in a box has and needs: without one that is known, nothing is found here, so no box
can ask as another's episode, nor write into its trace. Calls are kept in memory, for as long as their episode lasts.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from agentloop.gateway.app import EPISODE, PATHS, Gateway, route_of
from agentloop.gateway.calls import Calls
from agentloop.gateway.dialects import chat
from agentloop.gateway.exchange import BODY_S, MAX_BODY, say
from agentloop.gateway.prices import Price, by_usage, told
from agentloop.gateway.routes import NoRoute, Routes, Target, Upstream
from agentloop.policies.openai import TOO_LONG, OpenAIPolicy
from agentloop.protocols import Policy
from agentloop.store.keys import Spent
from agentloop.types import Completion, Limits, Message, Span, StopReason, ToolSpec

LEFT_S, SETTLE_S = 1.0, 10.0
"""How long calls may take to notice that nobody hears them any more; to end when they are told to."""
MAX_AT_ONCE, MAX_KEPT = 32, 256 << 20
"""Calls of one episode under way, and bytes of those that were made: a program in a box cannot fill this process."""
CUT = {"client_disconnected", "gateway_ended"}
UNAVAILABLE = {"unreachable", "silent", "broken_off", "rate_limit"}
"""What a call ends with whose upstream was unreachable or answered 429; a 5xx is `http_5…`. Anything else is an
answer, or the agent's own doing: an upstream that refuses with another status, or sends what cannot be read."""


@dataclass
class Grant:
    """What one episode may ask, and what it asked."""

    policy: Policy
    limits: Limits
    seed: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    spans: list[Span] = field(default_factory=list)
    """Of its calls, as they ended."""
    stop: StopReason | None = None
    """The limit that a call was refused for."""
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with `stop`."""
    n_bytes: int = 0
    """Of the spans, about."""
    n_begun: int = 0
    under_way: set[asyncio.Task[Any]] = field(default_factory=set)

    def __post_init__(self) -> None:
        policy = self.policy
        price: Price = told
        if isinstance(policy, OpenAIPolicy):
            key = policy.api_key.get_secret_value() if policy.api_key else None
            upstream, model = Upstream("the policy's endpoint", policy.base_url, key), policy.model
            price = by_usage(policy.price)
        else:
            model = policy.name
            upstream = Upstream(model, "", gives_tokens=True, via="policy", policy=_InTurn(policy))
        self.target = Target(upstream, model, settle=self.settled, price=price)

    @property
    def failed(self) -> Span | None:
        """The last call, when its upstream was unreachable or answered 429 or 5xx; calls that were cut do not count."""
        calls = [span for span in self.spans if span.kind == "chat" and _kind(span) not in CUT]
        last = max(calls, key=lambda span: span.start_ns, default=None)
        kind = _kind(last) if last is not None else None
        return last if kind is not None and (kind in UNAVAILABLE or kind.startswith("http_5")) else None

    @property
    def unpriced(self) -> bool:
        """Whether money is limited, and nobody knows what an answer cost."""
        answered = (span for span in self.spans if span.kind == "chat" and span.error is None)
        return self.limits.max_cost_usd is not None and any(span.cost_usd is None for span in answered)

    @property
    def overflowed(self) -> bool:
        """Whether the last call was refused because the conversation does not fit."""
        return bool(self.spans) and any(words in (self.spans[-1].error or "").lower() for words in TOO_LONG)

    def admit(self) -> tuple[int, str] | None:
        """None for a call that may be made, else the status, and why not."""
        if len(self.under_way) >= MAX_AT_ONCE:
            return 429, f"{MAX_AT_ONCE} calls are under way; wait for one of them"
        if self.n_bytes > MAX_KEPT:
            self._end(StopReason.step_limit)
            return 402, f"the episode's calls are more than {MAX_KEPT >> 20} MiB"
        n_answered = sum(span.kind == "chat" and span.error is None for span in self.spans)
        if n_answered + len(self.under_way) >= self.limits.max_steps:
            self._end(StopReason.step_limit)
            return 402, f"the episode has had its {self.limits.max_steps} turns"
        if self.unpriced:
            self._end(StopReason.cost_limit)
            return 402, "the episode may spend so much, and nobody knows what a call costs"
        spent, bound = sum(span.cost_usd or 0.0 for span in self.spans), self.limits.max_cost_usd
        if bound is not None and spent >= bound:
            self._end(StopReason.cost_limit)
            return 402, f"the episode may spend {bound:g} USD and has spent {spent:g}"
        return None

    def settled(self, sent: dict[str, Any]) -> dict[str, Any]:
        """A request as the episode makes it: what is sampled is the policy's and the task's to say."""
        asked, most = sent.pop("max_completion_tokens", None) or sent.get("max_tokens"), self.limits.max_tokens
        sent.pop("n", None)  # one turn is one answer
        made = {
            **sent,
            "max_tokens": min(asked, most) if isinstance(asked, int) else most,
            "seed": (self.seed + self.n_begun) % 2**31,
        }
        self.n_begun += 1
        if isinstance(self.policy, OpenAIPolicy):
            made |= {"temperature": self.policy.temperature, **self.policy.extra}
        return made

    async def end(self) -> None:
        """Cut what is under way, and wait until that is recorded."""
        if self.under_way:  # whoever asked is gone with its box's connection
            await asyncio.wait(self.under_way, timeout=LEFT_S)
        for task in list(self.under_way):
            task.cancel()
        if self.under_way:
            await asyncio.wait(self.under_way, timeout=SETTLE_S)

    def _end(self, stop: StopReason) -> None:
        self.stop = self.stop or stop
        self.stopped.set()


class _InTurn:
    """A policy that is asked one thing at a time, as policies of this process are used to."""

    def __init__(self, policy: Policy) -> None:
        self.name, self._policy, self._turn = policy.name, policy, asyncio.Lock()

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, max_tokens: int, seed: int
    ) -> Completion:
        async with self._turn:
            return await self._policy.complete(messages, tools, max_tokens=max_tokens, seed=seed)


class Grants(Routes):
    """Plain ASGI in front of a gateway of its own, and where that gateway's calls are routed and put; for one loop."""

    def __init__(self) -> None:
        super().__init__(())
        self._grants: dict[str, Grant] = {}
        self._calls = Calls(self, self._put)
        self._gateway = Gateway(_nowhere, self._calls)

    @asynccontextmanager
    async def granted(self, grant: Grant) -> AsyncIterator[None]:
        """For the length of the block its token is known; calls that are still under way then are cut, and recorded."""
        self._grants[grant.token] = grant
        try:
            yield
        finally:
            await grant.end()
            del self._grants[grant.token]

    async def close(self) -> None:
        """End the connections to upstreams."""
        await self._calls.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        path: str = scope["path"]
        token = path.removeprefix(EPISODE).partition("/")[0] if path.startswith(EPISODE) else ""
        grant, route = self._grants.get(token), route_of(scope)
        dialect = PATHS.get(route or "", chat)
        if grant is None or route is None:
            await _read(receive)
            await say(send, 404, dialect.error(404, "nothing is here; keep to the base URL that this box was given"))
            return
        refused = grant.admit() if route in PATHS and scope["method"] == "POST" else None
        if refused is not None:
            await _read(receive)
            await say(send, refused[0], dialect.error(*refused))
            return
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine that runs has one
        grant.under_way.add(task)
        try:
            await self._gateway(scope, receive, send)
        finally:
            grant.under_way.discard(task)

    async def find(self, model: str, sticky: str, episode: str | None = None) -> Target:
        """Whatever model it names, an episode asks its policy."""
        if episode not in self._grants:  # it ended while the call was read
            raise NoRoute("this episode is over")
        return self._grants[episode].target

    async def names(self) -> list[str]:
        """The policies' own."""
        return list(dict.fromkeys(grant.target.model for grant in self._grants.values()))

    async def _put(self, project: str, spans: Sequence[Span], n_bytes: int, spent: Mapping[str, Spent]) -> None:
        grant = self._grants.get(spans[-1].episode_id or "")
        if grant is not None:
            grant.spans += spans
            grant.n_bytes += n_bytes


async def _read(receive: Receive) -> None:
    """What a request that is refused still sends: answered before that, its client would see a connection break."""
    n = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(BODY_S):
            while n <= MAX_BODY:
                message = await receive()
                n += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body"):
                    return


async def _nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    await say(send, 404, chat.error(404, "nothing is here"))


def _kind(span: Span) -> str | None:
    """The word for what went wrong with a call; None when nothing did."""
    if span.error is None:
        return None
    kind: str = orjson.loads(span.head)["attributes"].get("error.type", "")
    return kind
