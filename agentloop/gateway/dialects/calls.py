"""The tool calls of one choice, put together from the pieces of a chat stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from agentloop.gateway.dialects.dialect import Json


class StreamedCall:
    __slots__ = ("id", "kind", "name", "pieces")

    def __init__(self, call_id: str, kind: str, name: str) -> None:
        self.id = call_id
        self.kind = kind
        self.name = name
        self.pieces: list[str] = []
        """Of its arguments."""

    def whole(self) -> Json:
        key = "input" if self.kind == "custom" else "arguments"
        return {"id": self.id, "type": self.kind, self.kind: {"name": self.name, key: "".join(self.pieces)}}


class StreamedCalls:
    """The calls in the order in which they began. Pieces of parallel calls may come interleaved."""

    def __init__(self) -> None:
        self._at: dict[int, StreamedCall] = {}
        self.begun: list[StreamedCall] = []

    def feed(self, deltas: Any) -> Iterator[tuple[StreamedCall, str]]:
        """Each call with news, and the new piece of its arguments, which may be empty."""
        for delta in deltas if isinstance(deltas, list) else ():
            if not isinstance(delta, dict):
                continue
            kind = "custom" if "custom" in delta else "function"
            function = delta.get(kind)
            function = function if isinstance(function, dict) else {}
            name = function.get("name")
            call_id = delta.get("id")
            index = delta.get("index")
            index = index if isinstance(index, int) else 0
            call = self._at.get(index)
            # Some servers give every parallel call the index 0, so another id with a name starts another call.
            if call is None or (name and call_id and call_id != call.id and call.name):
                call = self._at[index] = StreamedCall(str(call_id or f"call_{uuid4().hex}"), kind, str(name or ""))
                self.begun.append(call)
            elif name and not call.name:
                call.name = str(name)
            piece = function.get("input" if kind == "custom" else "arguments")
            piece = piece if isinstance(piece, str) else ""
            if piece:
                call.pieces.append(piece)
            yield call, piece
