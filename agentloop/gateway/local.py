"""A gateway on a unix socket, served by the event loop that is running: boxes are led there."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from agentloop.errors import SandboxUnavailable, boundary
from agentloop.gateway.grants import Grants

FOLDERS = Path("/tmp")  # noqa: S108 - short, because a unix socket's path has at most 107 bytes
KEPT_S = 3600
"""How long a connection may be idle; it is the box's, which may have so many at once and ends them all with itself."""
END_S = 10.0
"""For answers that are under way at the end."""


class LocalGateway:
    """One for all episodes that use it at once: the first one opens it, the last one closes it."""

    def __init__(self) -> None:
        self._open: dict[asyncio.AbstractEventLoop, _Open] = {}

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[tuple[Path, Grants]]:
        """(its socket, who may ask)."""
        loop = asyncio.get_running_loop()
        mine = self._open.setdefault(loop, _Open())
        mine.n_users += 1
        try:
            with boundary(SandboxUnavailable, "the gateway's socket cannot be opened"):
                ready = await mine.ready()
            yield ready
        finally:
            mine.n_users -= 1
            if not mine.n_users:
                del self._open[loop]
                await mine.stack.aclose()


class _Open:
    def __init__(self) -> None:
        self.n_users, self.stack = 0, AsyncExitStack()
        self._lock = asyncio.Lock()
        self._found: tuple[Path, Grants] | None = None

    async def ready(self) -> tuple[Path, Grants]:
        async with self._lock:
            if self._found is None:
                grants = Grants()
                self.stack.push_async_callback(grants.close)
                self._found = await self.stack.enter_async_context(served(grants)), grants
            return self._found


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[Path]:
    """The socket's path, in a folder that no other user can enter; at the end, nothing of it is left.

    Not `uvicorn.Server`, which takes over the process' signals and needs a tenth of a second to end.
    """
    config = uvicorn.Config(
        app, ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, date_header=False, timeout_keep_alive=KEPT_S,
    )  # fmt: skip
    config.load()
    state = ServerState()
    protocol = partial(HttpToolsProtocol, config, state, {})
    folder = Path(tempfile.mkdtemp(prefix=f"agentloop-{os.getpid()}-", dir=FOLDERS))
    try:
        server = await asyncio.get_running_loop().create_unix_server(protocol, folder / "gateway")
        try:
            yield folder / "gateway"
        finally:
            server.close()
            for connection in list(state.connections):
                connection.shutdown()
            if state.tasks:
                await asyncio.wait(list(state.tasks), timeout=END_S)
            await server.wait_closed()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
