"""The input items of the responses API as chat messages.

The API lists reasoning, texts and calls separately; in chat they are one message of the assistant. Consecutive items
form one message until text or reasoning follows text: a model thinks, speaks, and then calls.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from agentloop.gateway.dialects.completion import chat_message, text_of
from agentloop.gateway.dialects.dialect import Json
from agentloop.gateway.dialects.responses_custom import arguments_of
from agentloop.gateway.dialects.values import (
    Keep,
    array,
    file_part,
    function_call,
    image_part,
    joined,
    only,
    table,
    text,
    text_part,
    tool_messages,
)

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Chat templates of open models have no developer role."""


def messages_of(body: Json, keep: Keep) -> list[Json]:
    """All messages of the request. Leading instructions become one message, because many templates accept only one."""
    chat = Messages(keep)
    if isinstance(body.get("input"), str):
        chat.add(body["input"], "input")
    else:
        for n, item in enumerate(array(body.get("input"), "input")):
            chat.add(item, f"input.{n}")
    messages = chat.close()
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": text(body["instructions"], "instructions")})
    leading = list(takewhile(lambda message: message["role"] == "system", messages))
    contents = [message["content"] for message in leading]
    if not leading or not all(isinstance(content, str) for content in contents):  # one of them shows something
        return messages
    return [{"role": "system", "content": "\n\n".join(contents)}, *messages[len(leading) :]]


class Messages:
    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._messages: list[Json] = []
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[Json] = []
        self._attachments: list[Json] = []

    def add(self, item: Any, field: str) -> None:
        if isinstance(item, str):
            item = {"role": "user", "content": item}
        kind = table(item, field).get("type") or "message"
        if kind in ("function_call_output", "custom_tool_call_output"):
            self._close_answer()
            parts = self._parts(item.get("output"), f"{field}.output")
            result, attachments = tool_messages(text(item.get("call_id"), f"{field}.call_id"), parts)
            self._messages.append(result)
            self._attachments += attachments
            return
        self._close_results()
        if kind == "message":
            self._message(item, field)
        elif kind == "reasoning":
            if self._texts and not self._calls:
                self._close_answer()
            self._reasoning += self._thoughts(item, field)
        elif kind in ("function_call", "custom_tool_call"):
            call_id = text(item.get("call_id"), f"{field}.call_id")
            name = text(item.get("name"), f"{field}.name")
            if kind == "function_call":
                arguments = text(item.get("arguments"), f"{field}.arguments")
            else:
                arguments = arguments_of(text(item.get("input"), f"{field}.input"), f"{field}.input")
            self._calls.append(function_call(call_id, name, arguments))
        else:
            self._texts.append(self._keep(field, f"an item of type {kind!r:.60}", item))

    def close(self) -> list[Json]:
        self._close_answer()
        self._close_results()
        return self._messages

    def _message(self, item: Json, field: str) -> None:
        role = ROLES[only(item.get("role"), f"{field}.role", ROLES)]
        parts = self._parts(item.get("content"), f"{field}.content")
        if role != "assistant":
            self._close_answer()
            self._messages.append({"role": role, "content": joined(parts)})
            return
        if self._texts and not self._calls:
            self._close_answer()
        self._texts.append("".join(part["text"] for part in parts if part["type"] == "text"))

    def _thoughts(self, item: Json, field: str) -> list[str]:
        """The full text, otherwise the summary. Encrypted reasoning is omitted, because only OpenAI can read it."""
        for name in ("content", "summary"):
            where = f"{field}.{name}"
            if parts := array(item.get(name), where):
                return [text(table(part, where).get("text"), f"{where}.text") for part in parts]
        return []

    def _close_answer(self) -> None:
        reasoning = "\n".join(self._reasoning)
        if not (reasoning or self._texts or self._calls):
            return
        self._messages.append(chat_message("".join(self._texts), reasoning, "", self._calls, []))
        self._reasoning = []
        self._texts = []
        self._calls = []

    def _close_results(self) -> None:
        if self._attachments:
            self._messages.append({"role": "user", "content": self._attachments})
            self._attachments = []

    def _parts(self, content: Any, field: str) -> list[Json]:
        if isinstance(content, str):
            return [text_part(content)]
        return [self._part(table(part, f"{field}.{n}"), f"{field}.{n}") for n, part in enumerate(array(content, field))]

    def _part(self, part: Json, field: str) -> Json:
        kind = part.get("type")
        if kind in ("input_text", "output_text", "text"):
            return text_part(text(part.get("text"), f"{field}.text"))
        if kind == "refusal":
            return text_part(text(part.get("refusal"), f"{field}.refusal"))
        if kind == "input_image" and part.get("image_url"):
            return image_part(text(part["image_url"], f"{field}.image_url"), part.get("detail"))
        if kind == "input_file" and part.get("file_data"):
            return file_part(text(part["file_data"], f"{field}.file_data"), text_of(part, "filename") or "file")
        return text_part(self._keep(field, f"a part of type {kind!r:.60} that holds no data itself", part))
