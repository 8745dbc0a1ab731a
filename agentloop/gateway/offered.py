"""Which models can be asked for: by the settings, by the registry, and by what upstreams say they have."""

from __future__ import annotations

import asyncio

from agentloop.gateway.routes import NoRoute, Routes, no_model
from agentloop.gateway.upstreams import Upstreams


class Offered:
    """For one event loop."""

    def __init__(self, routes: Routes, upstreams: Upstreams) -> None:
        self._routes, self._upstreams = routes, upstreams

    async def names(self) -> list[str]:
        """Names that can be asked for, those included that upstreams say they have."""
        names = await self._routes.names()
        asked = [upstream for upstream in self._routes.upstreams if not upstream.serves_versions]
        found = await asyncio.gather(*map(self._upstreams.models, asked))
        return list(dict.fromkeys([*names, *(name for each in found for name in each)]))

    async def has(self, name: str) -> bool:
        """Whether that name can be asked for; one that fits a pattern can where its upstream lists none."""
        if name in await self.names():
            return True
        try:
            upstream = (await self._routes.find(name, "")).upstream
        except NoRoute:
            return False
        return not await self._upstreams.models(upstream)

    async def instead(self, error: NoRoute) -> str:
        """What to say to who asked for another one."""
        return str(error) if error.name is None else no_model(error.name, [*await self.names(), *self._routes.patterns])


async def problems(routes: Routes) -> dict[str, str]:
    """Upstream -> why it cannot be asked now, of those that cannot."""
    upstreams = Upstreams()
    try:
        found = await asyncio.gather(*map(upstreams.problem, routes.upstreams))
    finally:
        await upstreams.close()
    return {upstream.name: why for upstream, why in zip(routes.upstreams, found, strict=True) if why is not None}
