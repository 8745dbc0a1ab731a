"""The upstream for a model's name: aliases, policy versions of the registry, upstreams by pattern.

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
"""Episodes whose live version we remember, so that an episode ends with the version that it began with."""
MAX_LISTED = 30
"""Model names in an error message."""
MAX_NAME = 200
"""Characters of the unknown name in an error message."""
WILD = set("*?[")
FRESH_S = 2.0
"""How long a look-up of the live version stays valid."""
LIVE = "live"
PREFIX = "policy/"
ONE = float(1 << 64)


class NoRoute(ConfigError):
    """404: no upstream for that name."""

    def __init__(self, why: str, name: str | None = None) -> None:
        """name: the unknown name, if the message should suggest others."""
        super().__init__(why)
        self.name = name


def no_model(name: str, names: Sequence[str]) -> str:
    """The message for an unknown model, which lists the available ones."""
    listed = list(names[:MAX_LISTED])
    if len(names) > MAX_LISTED:
        listed.append(f"and {len(names) - MAX_LISTED} more")
    name = name[:MAX_NAME]
    return f"no model {name!r} here (available: {', '.join(listed) or 'none'}){did_you_mean(name, names)}"


@dataclass(frozen=True)
class Upstream:
    """A server of models."""

    name: str
    base_url: str
    """Ends before `/chat/completions`, as in `http://127.0.0.1:8000/v1`."""
    api_key: str | None = None
    dialects: frozenset[str] = frozenset({"chat"})
    """The dialects that it speaks: chat, responses, messages. Requests in any other are translated to chat."""
    models: tuple[str, ...] = ("*",)
    """Names, or patterns of names, that it answers for."""
    serves_versions: bool = False
    """Whether it serves the registry's versions, each as `policy-vN`."""
    gives_tokens: bool | None = None
    """Whether it returns token ids and log-probabilities, as vLLM does. None: find out from its list of models."""
    timeout_s: float = 600.0
    """From a request to the end of its answer."""
    silent_s: float = 120.0
    """How long it may send nothing."""
    via: str = "http"
    """`http`; `litellm`: calls go to that library, which knows many providers; `policy`: to the field `policy`."""
    policy: Policy | None = None
    """A policy of this process."""

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if self.via == "http" and not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"upstream {self.name!r}: base_url {self.base_url!r} is not a URL; write one like http://127.0.0.1:8000/v1"
            )


class Target(NamedTuple):
    """The upstream and the model that answer a call."""

    upstream: Upstream
    model: str
    """The upstream's name for it."""
    version: int | None = None
    """The policy version in the registry; None for any other model."""
    settle: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Turns the client's request into the one that is sent; None sends it unchanged."""
    price: Price | None = None
    """The price of its answers; None: the gateway's price."""


class Routes:
    """Finds the target for a name."""

    def __init__(
        self,
        upstreams: Sequence[Upstream],
        aliases: Mapping[str, Mapping[str, float]] | None = None,
        versions: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        """aliases: name -> names and their weights. versions: reads the registry, by number as text and `live`."""
        self.upstreams = tuple(upstreams)
        self.aliases = dict(aliases or {})
        self._read = versions or dict
        self._versions: Mapping[str, int] = {}
        self._read_at = -FRESH_S
        self._reading = Lock()
        self._begun: OrderedDict[str, int] = OrderedDict()

    async def find(self, model: str, sticky: str, episode: str | None = None) -> Target:
        """sticky: calls with the same value get the same target. episode: as the client names it.

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
        """The names that are known without a request: aliases, versions, and exact names in the settings."""
        serving = any(upstream.serves_versions for upstream in self.upstreams)
        versions = [f"{PREFIX}{number}" for number in await self._fresh_versions()] if serving else []
        exact = [name for upstream in self.upstreams for name in upstream.models if not set(name) & WILD]
        return [*self.aliases, *versions, *exact]

    @property
    def patterns(self) -> list[str]:
        """The patterns in the upstreams' settings, as opposed to exact names."""
        return [name for upstream in self.upstreams for name in upstream.models if set(name) & WILD]

    async def _version(self, name: str, sticky: str) -> Target:
        versions = await self._fresh_versions()
        upstream = next((each for each in self.upstreams if each.serves_versions), None)
        if upstream is None:
            raise NoRoute(f"{name}: no upstream serves versions; set `serves_versions = true` for one upstream")
        label = name.removeprefix(PREFIX)
        if label not in versions:
            raise NoRoute(
                f"no policy version {label!r} in the registry (available: {', '.join(versions) or 'none'}); "
                "create one with `agentloop loop`"
            )
        number = versions[label]
        if label == LIVE:  # an episode ends with the version that it began with
            number = self._begun.setdefault(sticky, number)
            self._begun.move_to_end(sticky)
            if len(self._begun) > MAX_BEGUN:
                self._begun.popitem(last=False)
        return Target(upstream, f"policy-v{number}", number)

    async def _fresh_versions(self) -> Mapping[str, int]:
        if time.monotonic() - self._read_at >= FRESH_S:
            async with self._reading:  # one read serves all calls that wait for it
                if time.monotonic() - self._read_at >= FRESH_S:
                    self._versions = await to_thread(self._read)
                    self._read_at = time.monotonic()
        return self._versions


def _drawn(weights: Mapping[str, float], seed: str) -> str:
    """One of the names by weight; `seed` alone decides which."""
    at = int.from_bytes(hashlib.blake2b(seed.encode(errors="replace"), digest_size=8).digest()) / ONE
    at *= sum(weights.values())
    for name, weight in weights.items():
        at -= weight
        if at < 0:
            return name
    return next(reversed(list(weights)))
