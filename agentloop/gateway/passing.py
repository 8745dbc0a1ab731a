"""An answer between two dialects: heard as it comes, passed on as the client reads it, its end kept back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from agentloop.gateway.dialects import chat
from agentloop.gateway.dialects.completion import table_of
from agentloop.gateway.dialects.dialect import BadAnswer, Dialect, Encoder
from agentloop.gateway.dialects.sse import Event
from agentloop.gateway.exchange import is_deep
from agentloop.gateway.failures import read_error
from agentloop.gateway.record import Call


class Passing:
    """An answer on its way from the upstream's dialect to the client's, and what was heard of it."""

    def __init__(self, dialect: Dialect, spoken: Dialect, call: Call, body: dict[str, Any]) -> None:
        self._dialect, self._spoken, self._call, self._body = dialect, spoken, call, body
        self._listener = spoken.listener(body)
        self._is_same = dialect is spoken and not (dialect is chat and call.is_exact)
        wants_usage = table_of(body, "stream_options").get("include_usage")
        # Usage is always asked of the upstream, so it is taken out again for a client that did not ask.
        self._encoder: Encoder | None = (
            None if self._is_same and (spoken is not chat or wants_usage) else dialect.encoder(body)
        )
        self._last: bytes | None = None
        self._has_begun = False
        self.is_done = False
        """Whether the upstream said that nothing follows."""

    @property
    def is_whole(self) -> bool:
        """Whether a streamed answer came to its end."""
        return self._listener.answer() is not None

    @property
    def why(self) -> str:
        """What the upstream said of a stream that it broke off."""
        error = self._listener.error
        return "" if error is None else f": {read_error(orjson.dumps(error))[0]}"

    def whole(self, said: bytes) -> bytes:
        """What the client is sent. Raises ValueError for what is no answer."""
        found = orjson.loads(said)
        if not isinstance(found, dict):
            raise BadAnswer("no JSON object")
        if is_deep(found):
            raise BadAnswer("JSON of too many levels")
        self._call.answer = self._spoken.answer_to_chat(found)
        return said if self._is_same else orjson.dumps(self._dialect.from_chat(found, self._body))

    def feed(self, events: Sequence[Event]) -> bytes:
        """Events of the upstream -> what the client is sent of them; the last one is kept back."""
        made: list[bytes] = []
        for name, data in events:
            if data == b"[DONE]":
                self.is_done = True
                continue
            event = orjson.loads(data)
            if not isinstance(event, dict):
                raise BadAnswer("an event that is no JSON object")
            self._has_begun = True
            self._listener.feed(event)
            if self._encoder is not None:
                made.append(self._encoder.feed(event))
            elif self._spoken is chat:
                made += (b"data: ", data, b"\n\n")
            else:
                passed = b"event: %b\ndata: %b\n\n" % (name.encode(), data)
                if self._last is None and self.is_whole:
                    self._last, self.is_done = passed, True
                else:
                    made.append(passed)
        return b"".join(made)

    def end(self) -> bytes:
        """What was kept back."""
        if self._last is not None:
            return self._last
        return (self._encoder or self._dialect.encoder(self._body)).end()

    def fail(self, status: int, why: str) -> bytes:
        """How a stream that breaks off ends, in the client's dialect."""
        return (self._encoder or self._dialect.encoder(self._body)).fail(status, why)

    def heard(self) -> dict[str, Any] | None:
        """What there was of a streamed answer, as a chat completion; None where nothing came."""
        if not self._has_begun:
            return None
        return self._spoken.answer_to_chat(self._listener.answer() or self._listener.partial())
