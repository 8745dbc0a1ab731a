"""The tool calls of one choice, put together from the pieces of a chat stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from agentloop.gateway.dialects.dialect import Json


class Call:
    __slots__ = ("id", "kind", "name", "pieces")

    def __init__(self, call_id: str, kind: str, name: str) -> None:
        self.id, self.kind, self.name = call_id, kind, name
        self.pieces: list[str] = []
        """Of its arguments."""

    def whole(self) -> Json:
        key = "input" if self.kind == "custom" else "arguments"
        return {"id": self.id, "type": self.kind, self.kind: {"name": self.name, key: "".join(self.pieces)}}


class Calls:
    """In the order in which they began. The pieces of parallel calls may come mixed."""

    def __init__(self) -> None:
        self._at: dict[int, Call] = {}
        self.begun: list[Call] = []

    def feed(self, deltas: Any) -> Iterator[tuple[Call, str]]:
        """Each call that something came for, and the piece of its arguments, which may be empty."""
        for delta in deltas if isinstance(deltas, list) else ():
            if not isinstance(delta, dict):
                continue
            kind = "custom" if "custom" in delta else "function"
            said = delta.get(kind)
            said = said if isinstance(said, dict) else {}
            name, call_id, index = said.get("name"), delta.get("id"), delta.get("index")
            index = index if isinstance(index, int) else 0
            call = self._at.get(index)
            # Some servers give every parallel call the index 0: what has another id and a name is another call.
            if call is None or (name and call_id and call_id != call.id and call.name):
                call = self._at[index] = Call(str(call_id or f"call_{uuid4().hex}"), kind, str(name or ""))
                self.begun.append(call)
            elif name and not call.name:
                call.name = str(name)
            piece = said.get("input" if kind == "custom" else "arguments")
            piece = piece if isinstance(piece, str) else ""
            if piece:
                call.pieces.append(piece)
            yield call, piece
