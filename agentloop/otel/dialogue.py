"""Where a span says what was said: messages, tool calls and results, in whichever of the ways there are.

Reads what `genai.restored` gives, and finds in it what `messages.py` reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import orjson

from agentloop.otel.contents import MESSAGE_EVENTS
from agentloop.otel.messages import as_text, first_of, message_of, messages_of, parsed
from agentloop.store.spans import DIALECT
from agentloop.types import Message

CONTENT_EVENTS = {
    "gen_ai.client.inference.operation.details",
    "gen_ai.content.prompt",
    "gen_ai.content.completion",
}
"""Events that hold attributes of the span they were said in."""
_MAX_NESTED = 16


class Chat(NamedTuple):
    """One call of a model. Empty where its content was not recorded."""

    inputs: list[Message]
    outputs: list[Message]
    finish_reason: str | None


class ToolUse(NamedTuple):
    """One run of a tool; None for what was not recorded."""

    call_id: str | None
    arguments: str | None
    content: str | None


def chat_of(said: dict[str, Any]) -> Chat:
    """What a model was told and what it answered."""
    told = _told(said)
    heard, answered, reasons = _of_events(said["events"])
    finish: Any = told.get("gen_ai.response.finish_reasons") or told.get("llm.finish_reason")
    finish = finish or told.get("ai.response.finishReason") or told.get("gen_ai.completion.0.finish_reason")
    if isinstance(finish, str) and finish.startswith("["):
        finish = parsed(finish)
    outputs, more = _outputs(told)
    first = next((r for r in [*(finish if isinstance(finish, list) else [finish]), *reasons, *more] if r), None)
    return Chat(_inputs(told) or heard, outputs or answered, None if first is None else str(first))


def inputs_of(said: dict[str, Any]) -> list[Message]:
    """What an agent was told."""
    return _inputs(_told(said))


def answer_of(said: dict[str, Any]) -> str | None:
    """What an agent gave back, as text."""
    told = _told(said)
    outputs, _ = _outputs(told)
    text = outputs[-1].content if outputs else _returned(told.get("traceloop.entity.output"))
    return as_text(text) if text not in (None, "") else None


def tool_of(said: dict[str, Any]) -> ToolUse:
    """What a tool was given and what it gave back."""
    get = said["attributes"].get
    call_id = get("gen_ai.tool.call.id") or get("tool_call.id") or get("ai.toolCall.id")
    arguments = first_of(get, "gen_ai.tool.call.arguments", "ai.toolCall.args", "input.value")
    arguments = _given(get("traceloop.entity.input")) if arguments is None else arguments
    content = first_of(get, "gen_ai.tool.call.result", "ai.toolCall.result", "output.value")
    content = _returned(get("traceloop.entity.output")) if content is None else content
    return ToolUse(
        None if call_id is None else str(call_id),
        None if arguments is None else as_text(arguments),
        None if content is None else as_text(content),
    )


def _given(value: Any) -> Any:
    """What a function was given, of which OpenLLMetry writes {"args", "kwargs"}: as a model would name it."""
    found = parsed(value)
    by_name = isinstance(found, dict) and found.keys() == {"args", "kwargs"} and not found["args"]
    return found["kwargs"] if by_name else value


def _returned(value: Any) -> Any:
    """What a function gave back, of which OpenLLMetry writes JSON: text as it was."""
    if isinstance(value, str) and value[:1] == '"':
        try:
            return orjson.loads(value)
        except ValueError:
            return value
    return value


def _told(said: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = said["attributes"]
    for event in said["events"]:
        if event["name"] in CONTENT_EVENTS:
            told = event["attributes"] | told
    return told


def _inputs(told: dict[str, Any]) -> list[Message]:
    made: list[Message] = []
    if system := told.get("gen_ai.system_instructions"):
        found = parsed(system) if isinstance(system, str) else system
        made += message_of({"role": "system", "parts": found if isinstance(found, list) else [system]}, "system")
    if messages := told.get("gen_ai.input.messages"):
        return made + messages_of(messages, "user")
    for prefix in ("gen_ai.prompt", "llm.input_messages"):
        if items := _unflattened(told, prefix):
            return made + messages_of(items, "user")
    for key in ("gen_ai.prompt", "ai.prompt.messages", "ai.prompt", "input.value"):
        if value := told.get(key):
            return made + messages_of(value, "user")
    return made


def _outputs(told: dict[str, Any]) -> tuple[list[Message], list[Any]]:
    """The answers, and their reasons to finish."""
    if value := told.get("gen_ai.output.messages"):
        found = parsed(value) if isinstance(value, str) else value
        if DIALECT in told and isinstance(found, list):  # the gateway writes a message for each choice
            value = found = found[:1]
        reasons = [m.get("finish_reason") for m in found if isinstance(m, dict)] if isinstance(found, list) else []
        return messages_of(value, "assistant"), reasons
    for prefix in ("gen_ai.completion", "llm.output_messages"):
        if items := _unflattened(told, prefix):
            return messages_of(items, "assistant"), [item.get("finish_reason") for item in items]
    if told.get("ai.response.text") or told.get("ai.response.toolCalls"):
        calls = told.get("ai.response.toolCalls")
        item = {"content": told.get("ai.response.text"), "tool_calls": parsed(calls) if calls else None}
        return message_of(item, "assistant"), []
    for key in ("gen_ai.completion", "output.value"):
        if value := told.get(key):
            return _answers(value)
    return [], []


def _answers(value: Any) -> tuple[list[Message], list[Any]]:
    found = parsed(value) if isinstance(value, str) else value
    choices = found.get("choices") if isinstance(found, dict) else None
    if isinstance(choices, list):  # the answer of a chat completions endpoint, as it came
        tables: list[dict[str, Any]] = [choice for choice in choices if isinstance(choice, dict)]
        first = next((choice for choice in tables if choice.get("index") == 0), next(iter(tables), {}))
        return messages_of(first.get("message"), "assistant"), [first.get("finish_reason")]
    is_message = isinstance(found, list) or (isinstance(found, dict) and found.keys() & {"role", "content", "messages"})
    return messages_of(found if is_message else [as_text(value)], "assistant"), []


def _of_events(events: Iterable[dict[str, Any]]) -> tuple[list[Message], list[Message], list[Any]]:
    heard: list[Message] = []
    answered: list[Message] = []
    reasons = []
    for event in events:
        if (role := MESSAGE_EVENTS.get(event["name"])) is None:
            continue
        item: Any = event["attributes"]
        if event["name"] == "gen_ai.choice":
            reasons.append(item.get("finish_reason"))
            message = item.get("message")
            message = parsed(message) or {"content": message} if isinstance(message, str) else message
            answered += message_of(message if isinstance(message, dict) else item, role)
        else:
            heard += message_of(item, role)
    return heard, answered, reasons


def _unflattened(told: dict[str, Any], prefix: str) -> list[dict[str, Any]]:
    """`prefix.0.a.b` and its like, as a list of objects."""
    tree: dict[str, Any] = {}
    start = f"{prefix}."
    for key, value in told.items():
        if not key.startswith(start):
            continue
        *path, last = key[len(start) :].split(".", _MAX_NESTED)
        node: Any = tree
        for name in path:
            node = node.setdefault(name, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.setdefault(last, value)
    found = _listed(tree)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def _listed(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    if node and all(name.isascii() and name.isdigit() for name in node):
        return [_listed(node[name]) for name in sorted(node, key=lambda name: (len(name), name))]
    return {name: _listed(item) for name, item in node.items()}
