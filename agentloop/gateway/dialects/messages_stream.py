"""The events of the Anthropic messages API: made of chat chunks, and put together as they pass by.

Blocks come one after another, as the API's own do. Tool calls come whole when the model has ended: only then is it
known that each is JSON, which clients take for granted, and that no piece of an earlier one follows.
Source: platform.claude.com/docs/en/build-with-claude/streaming.
"""

from __future__ import annotations

from typing import Any

import orjson

from agentloop.gateway.dialects import sse
from agentloop.gateway.dialects.chat_stream import ChatListener
from agentloop.gateway.dialects.completion import completion_of, key_of, number, reasoning_of, table_of, text_of
from agentloop.gateway.dialects.dialect import Json
from agentloop.gateway.dialects.errors import anthropic_error as error
from agentloop.gateway.dialects.messages_answer import UNREADABLE, ending, input_of, message, usage, use

EMPTY: dict[str, Json] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": "", "citations": None},
}


class MessagesEncoder:
    def __init__(self, body: Json) -> None:
        self._body = body
        self._whole = ChatListener({})
        self._key = ""
        self._open: str | None = None
        self._index = 0

    def feed(self, chunk: Json) -> bytes:
        self._whole.feed(chunk)
        made = b"" if self._key else self._start(chunk)
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict) or choice.get("index"):
                continue
            delta = table_of(choice, "delta")
            if thought := reasoning_of(delta):
                made += self._say("thinking", thought)
            if said := text_of(delta, "content") + text_of(delta, "refusal"):
                made += self._say("text", said)
        return made

    def end(self) -> bytes:
        made = b"" if self._key else self._start({})
        made += self._close()
        chat = self._whole.partial()
        chat["choices"] = chat["choices"] or [{"message": {}}]
        said = completion_of(chat, self._body)
        for call in said.calls:
            given = input_of(call.arguments)
            words = orjson.dumps(given).decode() if UNREADABLE in given else call.arguments.strip()
            made += self._begin("call", use(call))
            made += self._delta({"type": "input_json_delta", "partial_json": words})
            made += self._close()
        made += sse.named({"type": "message_delta", "delta": ending(said, self._body), "usage": usage(said.usage)})
        return made + sse.named({"type": "message_stop"})

    def fail(self, status: int, message: str, kind: str | None = None) -> bytes:
        return sse.named(error(status, message, kind))

    def _start(self, chunk: Json) -> bytes:
        self._key = key_of(chunk)
        said = completion_of({**chunk, "id": self._key, "choices": [{"message": {}}]}, self._body)
        return sse.named({"type": "message_start", "message": message(said)})

    def _say(self, kind: str, said: str) -> bytes:
        made = b""
        if self._open != kind:
            made = self._close() + self._begin(kind, EMPTY[kind])
        return made + self._delta({"type": f"{kind}_delta", kind: said})

    def _begin(self, kind: str, block: Json) -> bytes:
        self._open = kind
        return sse.named({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: Json) -> bytes:
        return sse.named({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        made = sse.named({"type": "content_block_stop", "index": self._index})
        self._open = None
        self._index += 1
        return made


GROWN = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
"""Kind of a delta -> the field of the block, and of the delta, that it adds to."""


class MessagesListener:
    def __init__(self, body: Json) -> None:
        self._message: Json = {}
        self._ending: Json = {}
        self._usage: Json = {}
        self._blocks: dict[int, tuple[Json, dict[str, list[Any]]]] = {}
        self._has_ended = False
        self.error: Json | None = None

    def feed(self, event: Json) -> None:
        kind = event.get("type")
        if kind == "content_block_delta":
            delta, block = table_of(event, "delta"), self._blocks.get(number(event, "index"))
            if block is None:
                return
            if field := GROWN.get(text_of(delta, "type")):
                block[1].setdefault(field, []).append(text_of(delta, field))
            elif delta.get("type") == "input_json_delta":
                block[1].setdefault("input", []).append(text_of(delta, "partial_json"))
            elif delta.get("type") == "citations_delta":
                block[1].setdefault("citations", []).append(delta.get("citation"))
        elif kind == "content_block_start":
            self._blocks[number(event, "index")] = (table_of(event, "content_block"), {})
        elif kind == "message_start":
            self._message = table_of(event, "message")
            self._usage = dict(table_of(self._message, "usage"))
        elif kind == "message_delta":
            self._ending |= table_of(event, "delta")
            told = table_of(event, "usage")
            self._usage |= {name: value for name, value in told.items() if value is not None}
        elif kind == "message_stop":
            self._has_ended = True
        elif kind == "error":
            self.error = event

    def answer(self) -> Json | None:
        return self.partial() if self._has_ended and not self.error else None

    def partial(self) -> Json:
        content = [_grown(*self._blocks[index]) for index in sorted(self._blocks)]
        return {**self._message, **self._ending, "content": content, "usage": self._usage}


def _grown(block: Json, pieces: dict[str, list[Any]]) -> Json:
    made = dict(block)
    for field, values in pieces.items():
        if field == "input":
            made["input"] = input_of("".join(values))
        elif field == "citations":
            made["citations"] = values
        else:
            made[field] = text_of(block, field) + "".join(values)
    return made
