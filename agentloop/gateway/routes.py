"""Who answers for a model's name: aliases, policy versions of the registry, upstreams by pattern.

policy/ab  ── by weights, the same for all calls of an episode ──▶  policy/live  or  policy/7
policy/live, policy/N  ── the registry ──▶  version N  ──▶  `policy-vN` at the upstream that serves versions
any other name  ──▶  the first upstream whose patterns it matches
"""

from __future__ import annotations

import hashlib
import time
from asyncio import Lock, to_thread
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from agentloop.errors import ConfigError, did_you_mean
from agentloop.gateway.prices import Price
from agentloop.protocols import Policy

MAX_BEGUN = 10_000
"""Episodes of which it is remembered which version was live when they began."""
MAX_LISTED, MAX_NAME = 30, 200
"""Names that are told of those there are; characters of one that is not."""
WILD = set("*?[")
FRESH_S = 2.0
"""How long the registry's word on which version is live is believed."""
LIVE = "live"
PREFIX = "policy/"
ONE = float(1 << 64)


class NoRoute(ConfigError):
    """404: nobody answers for that name."""

    def __init__(self, why: str, name: str | None = None) -> None:
        """name: where another one would do."""
        super().__init__(why)
        self.name = name


def no_model(name: str, known: Sequence[str]) -> str:
    """What to say of a model that is not there, and what is."""
    listed = ", ".join([*known[:MAX_LISTED], *([f"and {len(known) - MAX_LISTED} more"] if known[MAX_LISTED:] else [])])
    return f"no model {name[:MAX_NAME]!r} here (there are: {listed or 'none'}){did_you_mean(name[:MAX_NAME], known)}"


@dataclass(frozen=True)
class Upstream:
    """A server of models."""

    name: str
    base_url: str
    """Ends before `/chat/completions`, as in `http://127.0.0.1:8000/v1`."""
    api_key: str | None = None
    dialects: frozenset[str] = frozenset({"chat"})
    """What it speaks: chat, responses, messages. What it does not is translated to chat."""
    models: tuple[str, ...] = ("*",)
    """Names, or patterns of names, that it answers for."""
    serves_versions: bool = False
    """Whether it has the registry's versions, each as `policy-vN`."""
    gives_tokens: bool | None = None
    """vLLM: it is asked for token ids and log-probabilities, whatever the client asked for. None: ask who it is."""
    timeout_s: float = 600.0
    """From a request to the end of its answer."""
    silent_s: float = 120.0
    """How long it may say nothing."""
    via: str = "http"
    """`litellm` hands calls to that library, which knows every other provider; `policy` to the next."""
    policy: Policy | None = None
    """Of this process."""

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if self.via == "http" and not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"upstream {self.name!r}: base_url {self.base_url!r} is no URL such as http://127.0.0.1:8000/v1"
            )


class Target(NamedTuple):
    """Who answers a call."""

    upstream: Upstream
    model: str
    """What the upstream calls it."""
    version: int | None = None
    """Of the registry, where it is one of those."""
    settle: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """From a request as the client made it to the one that is sent."""
    price: Price | None = None
    """Of its answers, where it is not the gateway's to know."""


class Routes:
    """Which target a name has."""

    def __init__(
        self,
        upstreams: Sequence[Upstream],
        aliases: Mapping[str, Mapping[str, float]] | None = None,
        versions: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        """aliases: name -> names and their weights. versions: the registry's, by number in words and `live`."""
        self.upstreams = tuple(upstreams)
        self.aliases = dict(aliases or {})
        self._read = versions or dict
        self._versions: Mapping[str, int] = {}
        self._read_at, self._reading = -FRESH_S, Lock()
        self._begun: OrderedDict[str, int] = OrderedDict()

    async def find(self, model: str, sticky: str, episode: str | None = None) -> Target:
        """sticky: calls with the same are routed the same; episode: as the client names it.

        Raises NoRoute, and StoreError of the registry.
        """
        name = _drawn(self.aliases[model], f"{model}\0{sticky}") if model in self.aliases else model
        if name.startswith(PREFIX):
            return await self._version(name, sticky)
        for upstream in self.upstreams:
            if any(fnmatchcase(name, pattern) for pattern in upstream.models):
                return Target(upstream, name)
        raise NoRoute(no_model(name, [*await self.names(), *self.patterns]), name)

    async def names(self) -> list[str]:
        """The names that are known without asking anybody: aliases, versions, and what upstreams name exactly."""
        serving = any(upstream.serves_versions for upstream in self.upstreams)
        versions = [f"{PREFIX}{number}" for number in await self._known()] if serving else []
        exact = [name for upstream in self.upstreams for name in upstream.models if not set(name) & WILD]
        return [*self.aliases, *versions, *exact]

    @property
    def patterns(self) -> list[str]:
        """Of names that upstreams answer for, beside those that are known."""
        return [name for upstream in self.upstreams for name in upstream.models if set(name) & WILD]

    async def _version(self, name: str, sticky: str) -> Target:
        known = await self._known()
        upstream = next((each for each in self.upstreams if each.serves_versions), None)
        if upstream is None:
            raise NoRoute(f"{name}: no upstream serves versions; set `serves_versions = true` for one of them")
        asked = name.removeprefix(PREFIX)
        if asked not in known:
            raise NoRoute(
                f"no policy version {asked!r} in the registry (there are: {', '.join(known) or 'none'}); "
                "`agentloop loop` makes versions"
            )
        number = known[asked]
        if asked == LIVE:  # an episode ends with the version that it began with
            number = self._begun.setdefault(sticky, number)
            self._begun.move_to_end(sticky)
            if len(self._begun) > MAX_BEGUN:
                self._begun.popitem(last=False)
        return Target(upstream, f"policy-v{number}", number)

    async def _known(self) -> Mapping[str, int]:
        if time.monotonic() - self._read_at >= FRESH_S:
            async with self._reading:  # by one for all that wait
                if time.monotonic() - self._read_at >= FRESH_S:
                    self._versions, self._read_at = await to_thread(self._read), time.monotonic()
        return self._versions


def _drawn(weights: Mapping[str, float], seed: str) -> str:
    """One of the names, by a number in [0, 1) that follows from `seed` alone."""
    at = int.from_bytes(hashlib.blake2b(seed.encode(errors="replace"), digest_size=8).digest()) / ONE
    at *= sum(weights.values())
    for name, weight in weights.items():
        at -= weight
        if at < 0:
            return name
    return next(reversed(list(weights)))
