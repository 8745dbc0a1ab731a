"""An answer of the Anthropic messages API, out of a chat completion and back."""

from __future__ import annotations

from typing import Any

import orjson

from agentloop.gateway.dialects.completion import (
    Called,
    Completion,
    Usage,
    chat_answer,
    chat_message,
    completion_of,
    number,
    text_of,
)
from agentloop.gateway.dialects.dialect import BadAnswer, Json
from agentloop.gateway.dialects.given import dumped, function_call

STOPS = {"length": "max_tokens", "content_filter": "refusal", "tool_calls": "tool_use", "function_call": "tool_use"}
FINISHES = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content_filter",
}
UNREADABLE = "unreadable_arguments"
"""The one key of a call's input when the model wrote no JSON object: its words, so that the tool can refuse them."""
DEEPEST = 250
"""orjson writes no deeper JSON."""


def from_chat(answer: Json, body: Json) -> Json:
    said = completion_of(answer, body)
    content: list[Json] = []
    if said.reasoning:
        content.append({"type": "thinking", "thinking": said.reasoning, "signature": ""})
    if text := said.text + said.refusal:
        content.append({"type": "text", "text": text, "citations": None})
    content += [{**use(call), "input": input_of(call.arguments)} for call in said.calls]
    return {**message(said), "content": content, **ending(said, body), "usage": usage(said.usage)}


def message(said: Completion) -> Json:
    """As it starts: without content."""
    return {
        "id": f"msg_{said.key}",
        "type": "message",
        "role": "assistant",
        "model": said.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "usage": usage(None),
    }


def use(call: Called) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def input_of(arguments: str) -> Json:
    """The arguments as an object, which the API promises."""
    if not arguments.strip():
        return {}
    try:
        made = orjson.loads(arguments)
        if arguments.count("{") + arguments.count("[") > DEEPEST:
            orjson.dumps(made)
    except (ValueError, TypeError):
        made = None
    return made if isinstance(made, dict) else {UNREADABLE: arguments}


def ending(said: Completion, body: Json) -> Json:
    if said.refusal:
        reason = "refusal"
    elif said.finish in STOPS:
        reason = STOPS[said.finish]
    else:
        reason = "tool_use" if said.calls else "end_turn"
    sequences = body.get("stop_sequences")
    sequence = said.stop if isinstance(sequences, list) and said.stop in sequences else None
    details = {"type": "refusal", "category": None, "explanation": said.refusal or None}
    return {
        "stop_reason": "stop_sequence" if sequence else reason,
        "stop_sequence": sequence,
        "stop_details": details if reason == "refusal" else None,
    }


def usage(used: Usage | None) -> Json:
    """Tokens; the input's three kinds add up to the prompt."""
    used = used or Usage()
    return {
        "input_tokens": max(used.n_prompt - used.n_cached - used.n_written, 0),
        "cache_creation_input_tokens": used.n_written,
        "cache_read_input_tokens": used.n_cached,
        "output_tokens": used.n_completion,
    }


def answer_to_chat(answer: Json) -> Json:
    blocks = answer.get("content")
    if not isinstance(blocks, list):
        raise BadAnswer("the answer of the messages API has no content")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    other: list[Any] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(text_of(block, "text"))
        elif kind == "thinking":
            thoughts.append(text_of(block, "thinking"))
        elif kind == "tool_use":
            calls.append(function_call(text_of(block, "id"), text_of(block, "name"), arguments_of(block.get("input"))))
        else:
            other.append(block)
    used = answer.get("usage")
    cached, written = number(used, "cache_read_input_tokens"), number(used, "cache_creation_input_tokens")
    told = Usage(
        n_prompt=number(used, "input_tokens") + cached + written,
        n_completion=number(used, "output_tokens"),
        n_cached=cached,
        n_written=written,
        n_reasoning=number(used.get("output_tokens_details"), "thinking_tokens") if isinstance(used, dict) else 0,
    )
    finish = FINISHES.get(str(answer.get("stop_reason")))
    said = chat_message("".join(texts), "".join(thoughts), "", calls, other)
    made = chat_answer(text_of(answer, "id"), text_of(answer, "model"), 0, said, finish, told)
    if answer.get("stop_sequence"):
        made["choices"][0]["stop_reason"] = answer["stop_sequence"]
    return made


def arguments_of(given: Any) -> str:
    if isinstance(given, dict) and given.keys() == {UNREADABLE} and isinstance(words := given[UNREADABLE], str):
        return words
    return dumped(given if isinstance(given, dict) else {}, "input")
