"""A chat completion, parsed once for the dialects that translate it."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from agentloop.gateway.dialects.dialect import BadAnswer, Json

LARGEST = 2**53
"""Largest whole number that every JSON parser reads exactly."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens. n_cached and n_written are part of the prompt, n_reasoning is part of the completion."""

    n_prompt: int = 0
    n_completion: int = 0
    n_cached: int = 0
    n_written: int = 0
    n_reasoning: int = 0


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    key: str
    """The server's id without its prefix; a generated one if the server sent none."""
    model: str
    created: int
    """Seconds since the epoch."""
    text: str = ""
    reasoning: str = ""
    refusal: str = ""
    calls: list[FunctionCall] = field(default_factory=list)
    finish: str | None = None
    stop: str | None = None
    """The stop sequence that ended it, if the server reports it (vLLM)."""
    usage: Usage | None = None
    logprobs: list[Json] = field(default_factory=list)


def completion_of(answer: Json, body: Json) -> ChatCompletion:
    """The first choice. Raises BadAnswer if it is missing or has no message."""
    choice = object_of(next(iter(list_of(answer, "choices")), None))
    message = choice.get("message")
    if not isinstance(message, dict):
        raise BadAnswer("the upstream's answer has no message in its first choice")
    created = answer.get("created")
    if not isinstance(created, int):
        created = int(time.time())
    return ChatCompletion(
        key=key_of(answer),
        model=text_of(answer, "model") or text_of(body, "model"),
        created=created,
        text=text_of(message, "content"),
        reasoning=reasoning_of(message),
        refusal=text_of(message, "refusal"),
        calls=_calls(message),
        finish=text_of(choice, "finish_reason") or None,
        stop=text_of(choice, "stop_reason") or None,
        usage=usage_of(answer.get("usage")),
        logprobs=tables(table_of(choice, "logprobs"), "content"),
    )


def key_of(answer: Json) -> str:
    return re.sub(r"[^0-9A-Za-z]", "", text_of(answer, "id").removeprefix("chatcmpl-")) or uuid4().hex


def text_of(table: Json, name: str) -> str:
    value = table.get(name)
    return value if isinstance(value, str) else ""


def object_of(value: Any) -> Json:
    """`value` if it is an object, otherwise an empty one: an upstream may send anything."""
    return value if isinstance(value, dict) else {}


def table_of(table: Json, name: str) -> Json:
    return object_of(table.get(name))


def list_of(table: Json, name: str) -> list[Any]:
    value = table.get(name)
    return value if isinstance(value, list) else []


def tables(table: Json, name: str) -> list[Json]:
    """The objects in a list."""
    return [item for item in list_of(table, name) if isinstance(item, dict)]


def reasoning_of(message: Json) -> str:
    """The reasoning of a message or a delta. vLLM calls it `reasoning`, most others `reasoning_content`."""
    return text_of(message, "reasoning_content") or text_of(message, "reasoning")


def _calls(message: Json) -> list[FunctionCall]:
    function_calls = []
    for call in map(object_of, list_of(message, "tool_calls")):
        function = table_of(call, "function")
        if not text_of(function, "name"):
            raise BadAnswer("the upstream's answer has a tool call without a function's name")
        call_id = text_of(call, "id") or f"call_{uuid4().hex}"
        function_calls.append(FunctionCall(call_id, text_of(function, "name"), text_of(function, "arguments")))
    return function_calls


def usage_of(usage: Any) -> Usage | None:
    if not isinstance(usage, dict):
        return None
    prompt = usage.get("prompt_tokens_details")
    completion = usage.get("completion_tokens_details")
    return Usage(
        n_prompt=number(usage, "prompt_tokens"),
        n_completion=number(usage, "completion_tokens"),
        n_cached=number(prompt, "cached_tokens"),
        n_written=number(prompt, "cache_write_tokens"),
        n_reasoning=number(completion, "reasoning_tokens"),
    )


def number(table: Any, name: str) -> int:
    """A count, such as a number of tokens; 0 for any other value."""
    value = object_of(table).get(name)
    if type(value) is not int or not 0 <= value < LARGEST:
        return 0
    return value


def chat_answer(
    answer_id: str, model: str, created: int, message: Json, finish: str | None, usage: Usage | None
) -> Json:
    """A chat completion from another dialect's answer. finish: None if the answer broke off."""
    answer: Json = {
        "id": answer_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish}],
    }
    if usage:
        answer["usage"] = {
            "prompt_tokens": usage.n_prompt,
            "completion_tokens": usage.n_completion,
            "total_tokens": usage.n_prompt + usage.n_completion,
            "prompt_tokens_details": {"cached_tokens": usage.n_cached, "cache_write_tokens": usage.n_written},
            "completion_tokens_details": {"reasoning_tokens": usage.n_reasoning},
        }
    return answer


def chat_message(text: str, reasoning: str, refusal: str, calls: list[Json], other: list[Any]) -> Json:
    message: Json = {"role": "assistant", "content": text}
    if not text and (calls or refusal):
        message["content"] = None
    if reasoning:
        message["reasoning_content"] = reasoning
    if refusal:
        message["refusal"] = refusal
    if calls:
        message["tool_calls"] = calls
    if other:
        message["other"] = other
    return message
