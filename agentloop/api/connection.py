"""A client's connection: looks up its user once, and limits the time for the headers of a request.

uvicorn limits the idle time between requests, but waits indefinitely for the first byte of the first request and for
the rest of headers that have begun.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentloop.api.peer import uid_of

HEADERS_S = 10.0
"""Maximum seconds from the connect, or from the first byte of a later request, to the end of the headers."""
PEER_UID = "peer_uid"
"""Key of a request's state for the user at the other end; the value is None if the kernel does not know."""
LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with this time limit and this state."""

    _due_since: float | None = None
    """Start time of the wait for headers; None while a request is answered, and between two requests."""
    _has_begun = False
    """Whether a byte of a request has arrived."""
    _timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        # uvicorn has set both ends above. A unix socket has no port.
        is_tcp = self.client is not None and self.server is not None and self.server[1] is not None
        uid = uid_of(self.client, (self.server[0], self.server[1])) if is_tcp else None  # type: ignore[arg-type, index]
        self.app_state = {**self.app_state, PEER_UID: uid}
        self._due_since = self.loop.time()
        # One timer for the whole connection: `_check` arms it again only when it is due.
        self._timer = self.loop.call_later(HEADERS_S, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._timer.cancel()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """See httptools."""
        super().on_message_begin()
        self._due_since = self.loop.time()
        self._has_begun = True

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._due_since = None
        super().on_headers_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: the answer to the request itself reports that the upgrade is not supported."""

    def _check(self) -> None:
        now = self.loop.time()
        if self._is_answering():  # a pipelined request stays unread until the present one is answered
            self._due_since = self._due_since and now
        left = HEADERS_S if self._due_since is None else self._due_since + HEADERS_S - now
        if left > 0:
            self._timer = self.loop.call_later(left, self._check)
            return
        # A client that has sent nothing expects no answer.
        if self._has_begun:
            self.transport.write(LATE)
        self.transport.close()

    def _is_answering(self) -> bool:
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete
