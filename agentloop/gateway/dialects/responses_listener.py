"""A stream of the OpenAI responses API put together while it passes by.

The last event holds all of it; the others are kept for a stream that breaks off.
"""

from __future__ import annotations

from agentloop.gateway.dialects.completion import number, table_of, text_of
from agentloop.gateway.dialects.dialect import Json
from agentloop.gateway.dialects.responses_answer import part

ENDS = {"response.completed", "response.incomplete"}
KINDS = {
    "response.output_text.delta": "text",
    "response.refusal.delta": "refusal",
    "response.reasoning_text.delta": "reasoning",
    "response.function_call_arguments.delta": "call",
    "response.custom_tool_call_input.delta": "custom",
}


class ResponsesListener:
    def __init__(self, body: Json) -> None:
        self._response: Json = {}
        self._items: dict[int, Json] = {}
        self._pieces: dict[int, dict[int, tuple[str, list[str]]]] = {}
        """Item -> part -> what it is, and what came for it; only of items that are open."""
        self._has_ended = False
        self.error: Json | None = None

    def feed(self, event: Json) -> None:
        kind = text_of(event, "type")
        if said := KINDS.get(kind):
            parts = self._pieces.setdefault(number(event, "output_index"), {})
            parts.setdefault(number(event, "content_index"), (said, []))[1].append(text_of(event, "delta"))
        elif kind in ("response.output_item.added", "response.output_item.done"):
            index = number(event, "output_index")
            self._items[index] = table_of(event, "item")
            self._pieces.pop(index, None)
        elif kind == "error":
            self.error = event
        elif "response" in event:
            self._response = table_of(event, "response")
            self._has_ended = kind in ENDS
            if kind == "response.failed":
                self.error = table_of(self._response, "error") or event

    def answer(self) -> Json | None:
        return self._response if self._has_ended and not self.error else None

    def partial(self) -> Json:
        if self._has_ended or self._response.get("output"):
            return self._response
        return {**self._response, "output": [self._item(index) for index in sorted(self._items)]}

    def _item(self, index: int) -> Json:
        item, parts = self._items[index], self._pieces.get(index)
        if not parts:
            return item
        if item.get("type") == "function_call":
            return {**item, "arguments": _joined(parts)}
        if item.get("type") == "custom_tool_call":
            return {**item, "input": _joined(parts)}
        return {**item, "content": [part(parts[n][0], "".join(parts[n][1])) for n in sorted(parts)]}


def _joined(parts: dict[int, tuple[str, list[str]]]) -> str:
    return "".join(piece for _, pieces in parts.values() for piece in pieces)
