"""An answer of the OpenAI responses API, out of a chat completion and back."""

from __future__ import annotations

from typing import Any

from agentloop.gateway.dialects.completion import (
    LARGEST,
    Completion,
    Usage,
    chat_answer,
    chat_message,
    completion_of,
    number,
    table_of,
    tables,
    text_of,
)
from agentloop.gateway.dialects.dialect import BadAnswer, Json
from agentloop.gateway.dialects.given import function_call
from agentloop.gateway.dialects.responses_custom import arguments_of, input_of, names_of
from agentloop.gateway.dialects.responses_request import asks_logprobs

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
"""Fields of the request that the answer repeats -> what it says when the request does not."""
FUNCTION: Json = {"strict": None, "parameters": None}
"""What the answer says of a function where the request says nothing."""
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
PREFIXES = {"reasoning": "rs", "text": "msg", "refusal": "msg", "call": "fc", "custom": "ctc"}


def from_chat(answer: Json, body: Json) -> Json:
    said = completion_of(answer, body)
    parts: list[tuple[str, str, str, str]] = [
        (kind, words, "", "")
        for kind, words in (("reasoning", said.reasoning), ("text", said.text), ("refusal", said.refusal))
        if words
    ]
    custom = names_of(body)
    parts += [("custom" if c.name in custom else "call", c.arguments, c.id, c.name) for c in said.calls]
    parts = parts or [("text", "", "", "")]  # a turn without an item would be missing from the next request
    logprobs = logprobs_of(said.logprobs) if asks_logprobs(body) else []
    output = []
    for n, (kind, words, call_id, name) in enumerate(parts):
        ended = status(said) if n == len(parts) - 1 else "completed"
        output.append(item(kind, item_id(kind, said.key, n), words, ended, call_id, name, logprobs))
    return response(said, body, output)


def response(said: Completion, body: Json, output: list[Json] | None) -> Json:
    """output: None while it is in progress."""
    ended = "in_progress" if output is None else status(said)
    echoed = {name: default if body.get(name) is None else body[name] for name, default in ECHOED.items()}
    return {
        "id": f"resp_{said.key}",
        "object": "response",
        "created_at": said.created,
        "status": ended,
        "error": None,
        "incomplete_details": {"reason": INCOMPLETE[str(said.finish)]} if ended == "incomplete" else None,
        "model": said.model,
        "output": output or [],
        "previous_response_id": None,
        "store": False,
        "tools": [FUNCTION | tool if tool.get("type") == "function" else tool for tool in tables(body, "tools")],
        "usage": usage(said.usage) if output is not None else None,
        **echoed,
    }


def status(said: Completion) -> str:
    return "incomplete" if said.finish in INCOMPLETE else "completed"


def item_id(kind: str, key: str, n: int) -> str:
    return f"{PREFIXES[kind]}_{key}_{n}"


def item(
    kind: str, given_id: str, words: str, ended: str, call_id: str, name: str, logprobs: list[Json] | None = None
) -> Json:
    """An item of the output. An empty one, in progress, has no part yet."""
    made: Json = {"id": given_id, "type": "message", "status": ended}
    if kind == "custom":
        return {**made, "type": "custom_tool_call", "call_id": call_id, "name": name, "input": input_of(words)}
    if kind == "call":
        return {**made, "type": "function_call", "call_id": call_id, "name": name, "arguments": words}
    content = [] if ended == "in_progress" else [part(kind, words, logprobs)]
    if kind == "reasoning":
        return {**made, "type": "reasoning", "summary": [], "content": content}
    return {**made, "role": "assistant", "content": content}


def part(kind: str, words: str, logprobs: list[Json] | None = None) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": words}
    if kind == "refusal":
        return {"type": "refusal", "refusal": words}
    return {"type": "output_text", "text": words, "annotations": [], "logprobs": logprobs or []}


def logprobs_of(content: Any) -> list[Json]:
    """Those of chat, which may leave out the bytes and the other tokens."""
    return [{**_token(token), "top_logprobs": [*map(_token, tables(token, "top_logprobs"))]} for token in content]


def _token(token: Json) -> Json:
    return {"token": token.get("token"), "logprob": token.get("logprob"), "bytes": token.get("bytes") or []}


def usage(used: Usage | None) -> Json | None:
    if used is None:
        return None
    return {
        "input_tokens": used.n_prompt,
        "input_tokens_details": {"cached_tokens": used.n_cached, "cache_write_tokens": used.n_written},
        "output_tokens": used.n_completion,
        "output_tokens_details": {"reasoning_tokens": used.n_reasoning},
        "total_tokens": used.n_prompt + used.n_completion,
    }


def answer_to_chat(answer: Json) -> Json:
    output = answer.get("output")
    if not isinstance(output, list):
        raise BadAnswer("the answer of the responses API has no output")
    texts: dict[str, list[str]] = {"text": [], "refusal": [], "reasoning": []}
    calls: list[Json] = []
    other: list[Any] = []
    for made in output:
        kind = made.get("type") if isinstance(made, dict) else None
        if kind == "function_call":
            call_id, name = text_of(made, "call_id"), text_of(made, "name")
            calls.append(function_call(call_id, name, text_of(made, "arguments")))
        elif kind == "custom_tool_call":
            arguments = arguments_of(text_of(made, "input"), "input")
            calls.append(function_call(text_of(made, "call_id"), text_of(made, "name"), arguments))
        elif kind == "message":
            for held in tables(made, "content"):
                texts["refusal" if held.get("type") == "refusal" else "text"] += [
                    text_of(held, "text") + text_of(held, "refusal")
                ]
        elif kind == "reasoning":
            thoughts = tables(made, "content") or tables(made, "summary")
            texts["reasoning"] += [text_of(held, "text") for held in thoughts]
        else:
            other.append(made)
    said, thought, refused = "".join(texts["text"]), "\n".join(texts["reasoning"]), "".join(texts["refusal"])
    reason = text_of(table_of(answer, "incomplete_details"), "reason")
    finish = {"completed": "tool_calls" if calls else "stop", "incomplete": "length"}.get(text_of(answer, "status"))
    finish = "content_filter" if finish and reason == "content_filter" else finish
    created = answer.get("created_at")
    return chat_answer(
        text_of(answer, "id"),
        text_of(answer, "model"),
        int(created) if isinstance(created, int | float) and abs(created) < LARGEST else 0,
        chat_message(said, thought, refused, calls, other),
        finish,
        _usage(answer),
    )


def _usage(answer: Json) -> Usage | None:
    used = table_of(answer, "usage")
    if not used:
        return None
    return Usage(
        n_prompt=number(used, "input_tokens"),
        n_completion=number(used, "output_tokens"),
        n_cached=number(used.get("input_tokens_details"), "cached_tokens"),
        n_written=number(used.get("input_tokens_details"), "cache_write_tokens"),
        n_reasoning=number(used.get("output_tokens_details"), "reasoning_tokens"),
    )
