"""How the service ends: what is under way may end by itself for a while, is then told, and nothing says a traceback.

    Ctrl-C  ─▶  no new requests, up to ENDING_S seconds for those under way  ─▶  the rest is cut
    again   ─▶  the rest is cut now

A call of a model that is cut is recorded as `gateway_ended`, and its client is told so in its own dialect.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from agentloop.api.connection import Connection
from agentloop.errors import counted

ENDING_S, CUT_S = 10, 5
"""Seconds for what is under way to end by itself; to be written down once it is cut."""


class UvicornServer(uvicorn.Server):
    """Uvicorn with that end, for one run."""

    def __init__(self, app: ASGIApp, host: str, port: int, say: Callable[[str], None]) -> None:
        """say: where one line goes that says what is waited for."""
        super().__init__(
            uvicorn.Config(
                _until_cut(app),
                host,
                port,
                http=Connection,
                ws="none",  # so that a request for a WebSocket is answered like any other
                log_config=None,  # the command line prints what is logged
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=ENDING_S + CUT_S,
            )
        )
        self._say, self._n_signals, self._again = say, 0, asyncio.Event()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn; the second signal ends the wait alone, because there the end would be one without its order."""
        self._n_signals += 1
        if self._n_signals == 2:
            self._again.set()
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        cutting = asyncio.create_task(self._cut())
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()

    async def _cut(self) -> None:
        tasks = self.server_state.tasks
        if tasks:
            under_way = counted(len(tasks), "request")
            self._say(f"ending: {under_way} under way, for up to {ENDING_S} s; Ctrl-C again ends at once")
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDING_S):
                await self._again.wait()
        if tasks:
            self._say(f"ending: {counted(len(tasks), 'request')} cut")
        for task in list(tasks):
            task.cancel()


def _until_cut(app: ASGIApp) -> ASGIApp:
    async def quietly(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):  # a request's task ends here anyway, and uvicorn would show a traceback
            await app(scope, receive, send)

    return quietly
