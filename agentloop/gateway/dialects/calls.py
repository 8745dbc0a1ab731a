"""The tool calls of one choice, assembled from the pieces of a chat stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from agentloop.gateway.dialects.completion import table_of, text_of
from agentloop.gateway.dialects.dialect import Json

ARGUMENTS = {"function": "arguments", "custom": "input"}
"""Kind of a call -> the field of its arguments."""


class StreamedCall:
    __slots__ = ("id", "kind", "name", "pieces")

    def __init__(self, call_id: str, kind: str, name: str) -> None:
        self.id = call_id
        self.kind = kind
        self.name = name
        self.pieces: list[str] = []
        """Pieces of its arguments."""

    def whole(self) -> Json:
        arguments = {"name": self.name, ARGUMENTS[self.kind]: "".join(self.pieces)}
        return {"id": self.id, "type": self.kind, self.kind: arguments}


class StreamedCalls:
    """The calls in the order in which they began. Pieces of parallel calls may be interleaved."""

    def __init__(self) -> None:
        self._at: dict[int, StreamedCall] = {}
        self.begun: list[StreamedCall] = []

    def feed(self, deltas: Any) -> Iterator[tuple[StreamedCall, str]]:
        """Each call with new data, and the new piece of its arguments, which may be empty."""
        if not isinstance(deltas, list):
            return
        for delta in deltas:
            if not isinstance(delta, dict):
                continue
            kind = "custom" if "custom" in delta else "function"
            function = table_of(delta, kind)
            name = function.get("name")
            call_id = delta.get("id")
            index = delta.get("index")
            if not isinstance(index, int):
                index = 0
            call = self._at.get(index)
            # Some servers give every parallel call the index 0, so another id with a name starts another call.
            if call is None or (name and call_id and call_id != call.id and call.name):
                call = self._at[index] = StreamedCall(str(call_id or f"call_{uuid4().hex}"), kind, str(name or ""))
                self.begun.append(call)
            elif name and not call.name:
                call.name = str(name)
            piece = text_of(function, ARGUMENTS[kind])
            if piece:
                call.pieces.append(piece)
            yield call, piece
