"""An answer of the OpenAI responses API, from a chat completion and back."""

from __future__ import annotations

from typing import Any

from agentloop.gateway.dialects.completion import (
    LARGEST,
    ChatCompletion,
    Usage,
    chat_answer,
    chat_message,
    completion_of,
    number,
    object_of,
    table_of,
    tables,
    text_of,
)
from agentloop.gateway.dialects.dialect import BadAnswer, Json
from agentloop.gateway.dialects.responses_custom import arguments_of, input_of, names_of
from agentloop.gateway.dialects.responses_request import asks_logprobs
from agentloop.gateway.dialects.values import function_call

ECHOED: Json = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Fields of the request that the answer repeats -> their defaults."""
FUNCTION: Json = {"strict": None, "parameters": None}
"""Defaults of a function's fields in the answer."""
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
PREFIXES = {"reasoning": "rs", "text": "msg", "refusal": "msg", "call": "fc", "custom": "ctc"}


def from_chat(answer: Json, body: Json) -> Json:
    completion = completion_of(answer, body)
    parts: list[tuple[str, str, str, str]] = [
        (kind, words, "", "")
        for kind, words in (
            ("reasoning", completion.reasoning),
            ("text", completion.text),
            ("refusal", completion.refusal),
        )
        if words
    ]
    custom = names_of(body)
    parts += [("custom" if c.name in custom else "call", c.arguments, c.id, c.name) for c in completion.calls]
    parts = parts or [("text", "", "", "")]  # a turn without an item would be missing from the next request
    logprobs: list[Json] = []
    if asks_logprobs(body):
        logprobs = logprobs_of(completion.logprobs)
    output = []
    for n, (kind, words, call_id, name) in enumerate(parts):
        state = status(completion) if n == len(parts) - 1 else "completed"
        output.append(item(kind, item_id(kind, completion.key, n), words, state, call_id, name, logprobs))
    return response(completion, body, output)


def response(completion: ChatCompletion, body: Json, output: list[Json] | None) -> Json:
    """output: None while it is in progress."""
    state = "in_progress"
    tokens = None
    details = None
    if output is not None:
        state = status(completion)
        tokens = usage(completion.usage)
    if state == "incomplete":
        details = {"reason": INCOMPLETE[str(completion.finish)]}
    return {
        "id": f"resp_{completion.key}",
        "object": "response",
        "created_at": completion.created,
        "status": state,
        "error": None,
        "incomplete_details": details,
        "model": completion.model,
        "output": output or [],
        "previous_response_id": None,
        "store": False,
        "tools": [FUNCTION | tool if tool.get("type") == "function" else tool for tool in tables(body, "tools")],
        "usage": tokens,
        **ECHOED,
        **{name: body[name] for name in ECHOED if body.get(name) is not None},
    }


def status(completion: ChatCompletion) -> str:
    return "incomplete" if completion.finish in INCOMPLETE else "completed"


def item_id(kind: str, key: str, n: int) -> str:
    return f"{PREFIXES[kind]}_{key}_{n}"


def item(
    kind: str, own_id: str, words: str, state: str, call_id: str, name: str, logprobs: list[Json] | None = None
) -> Json:
    """An item of the output. An item in progress has no part yet."""
    fields: Json = {"id": own_id, "type": "message", "status": state}
    if kind == "custom":
        return {**fields, "type": "custom_tool_call", "call_id": call_id, "name": name, "input": input_of(words)}
    if kind == "call":
        return {**fields, "type": "function_call", "call_id": call_id, "name": name, "arguments": words}
    content = [] if state == "in_progress" else [part(kind, words, logprobs)]
    if kind == "reasoning":
        return {**fields, "type": "reasoning", "summary": [], "content": content}
    return {**fields, "role": "assistant", "content": content}


def part(kind: str, words: str, logprobs: list[Json] | None = None) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": words}
    if kind == "refusal":
        return {"type": "refusal", "refusal": words}
    return {"type": "output_text", "text": words, "annotations": [], "logprobs": logprobs or []}


def logprobs_of(content: Any) -> list[Json]:
    """The log-probabilities of chat, which may lack the bytes and the other tokens."""
    return [{**_token(token), "top_logprobs": [*map(_token, tables(token, "top_logprobs"))]} for token in content]


def _token(token: Json) -> Json:
    return {"token": token.get("token"), "logprob": token.get("logprob"), "bytes": token.get("bytes") or []}


def usage(tokens: Usage | None) -> Json | None:
    if tokens is None:
        return None
    return {
        "input_tokens": tokens.n_prompt,
        "input_tokens_details": {"cached_tokens": tokens.n_cached, "cache_write_tokens": tokens.n_written},
        "output_tokens": tokens.n_completion,
        "output_tokens_details": {"reasoning_tokens": tokens.n_reasoning},
        "total_tokens": tokens.n_prompt + tokens.n_completion,
    }


def answer_to_chat(answer: Json) -> Json:
    output = answer.get("output")
    if not isinstance(output, list):
        raise BadAnswer("the answer of the responses API has no output")
    texts: dict[str, list[str]] = {"text": [], "refusal": [], "reasoning": []}
    calls: list[Json] = []
    other: list[Any] = []
    for entry in output:
        kind = object_of(entry).get("type")
        if kind == "function_call":
            call_id = text_of(entry, "call_id")
            name = text_of(entry, "name")
            calls.append(function_call(call_id, name, text_of(entry, "arguments")))
        elif kind == "custom_tool_call":
            arguments = arguments_of(text_of(entry, "input"), "input")
            calls.append(function_call(text_of(entry, "call_id"), text_of(entry, "name"), arguments))
        elif kind == "message":
            for piece in tables(entry, "content"):
                field = "refusal" if piece.get("type") == "refusal" else "text"
                texts[field].append(text_of(piece, "text") + text_of(piece, "refusal"))
        elif kind == "reasoning":
            thoughts = tables(entry, "content") or tables(entry, "summary")
            texts["reasoning"] += [text_of(piece, "text") for piece in thoughts]
        else:
            other.append(entry)
    words = "".join(texts["text"])
    thought = "\n".join(texts["reasoning"])
    refusal = "".join(texts["refusal"])
    created = answer.get("created_at")
    return chat_answer(
        text_of(answer, "id"),
        text_of(answer, "model"),
        int(created) if isinstance(created, int | float) and abs(created) < LARGEST else 0,
        chat_message(words, thought, refusal, calls, other),
        _finish(answer, calls),
        _usage(answer),
    )


def _finish(answer: Json, calls: list[Json]) -> str | None:
    """The finish reason in chat; None if the answer broke off."""
    state = text_of(answer, "status")
    if state not in ("completed", "incomplete"):
        return None
    if text_of(table_of(answer, "incomplete_details"), "reason") == "content_filter":
        return "content_filter"
    if state == "incomplete":
        return "length"
    if calls:
        return "tool_calls"
    return "stop"


def _usage(answer: Json) -> Usage | None:
    tokens = table_of(answer, "usage")
    if not tokens:
        return None
    return Usage(
        n_prompt=number(tokens, "input_tokens"),
        n_completion=number(tokens, "output_tokens"),
        n_cached=number(tokens.get("input_tokens_details"), "cached_tokens"),
        n_written=number(tokens.get("input_tokens_details"), "cache_write_tokens"),
        n_reasoning=number(tokens.get("output_tokens_details"), "reasoning_tokens"),
    )
