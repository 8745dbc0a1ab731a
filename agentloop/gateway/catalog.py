"""The models that a client can name: from the settings, from the registry, and from the upstreams' own lists."""

from __future__ import annotations

import asyncio
from itertools import chain

from agentloop.gateway.routes import NoRoute, Routes, no_model
from agentloop.gateway.upstreams import Upstreams


class Catalog:
    """The names of all models; for one event loop."""

    def __init__(self, routes: Routes, upstreams: Upstreams) -> None:
        self._routes = routes
        self._upstreams = upstreams

    async def names(self) -> list[str]:
        """All names: those of the routes, and those that upstreams list."""
        names = await self._routes.names()
        upstreams = [upstream for upstream in self._routes.upstreams if not upstream.serves_versions]
        lists = await asyncio.gather(*map(self._upstreams.models, upstreams))
        return list(dict.fromkeys(chain(names, *lists)))

    async def has(self, name: str) -> bool:
        """Whether a client can use that name. A name that matches a pattern counts if its upstream lists no models."""
        if name in await self.names():
            return True
        try:
            upstream = (await self._routes.find(name, "")).upstream
        except NoRoute:
            return False
        return not await self._upstreams.models(upstream)

    async def instead(self, error: NoRoute) -> str:
        """The message for a client whose model has no route: it lists the models that have one."""
        return str(error) if error.name is None else no_model(error.name, [*await self.names(), *self._routes.patterns])


async def problems(routes: Routes) -> dict[str, str]:
    """Upstream -> why it is not available now; available ones are missing."""
    upstreams = Upstreams()
    try:
        reasons = await asyncio.gather(*map(upstreams.problem, routes.upstreams))
    finally:
        await upstreams.close()
    return {upstream.name: why for upstream, why in zip(routes.upstreams, reasons, strict=True) if why is not None}
