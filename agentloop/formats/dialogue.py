"""Messages and tool calls that a span tells of, in whichever of the ways there are.

Reads what `genai.restored` gives. Never raises for what it does not understand: that stays in the span.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import orjson

from agentloop.formats.contents import MESSAGE_EVENTS
from agentloop.types import Message, ToolCall

CONTENT_EVENTS = {
    "gen_ai.client.inference.operation.details",
    "gen_ai.content.prompt",
    "gen_ai.content.completion",
}
"""Events that hold attributes of the span they were said in."""
CALLS = {"tool_call", "tool_use", "tool-call", "function_call", "function"}
RESULTS = {"tool_call_response", "tool_result", "tool-result", "function_call_output"}
REASONING = {"reasoning", "thinking"}
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
        finish = _parsed(finish)
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
    text = outputs[-1].content if outputs else told.get("traceloop.entity.output")
    return _as_text(text) if text not in (None, "") else None


def tool_of(said: dict[str, Any]) -> ToolUse:
    """What a tool was given and what it gave back."""
    get = said["attributes"].get
    call_id = get("gen_ai.tool.call.id") or get("tool_call.id") or get("ai.toolCall.id")
    arguments = _first(get, "gen_ai.tool.call.arguments", "ai.toolCall.args", "input.value", "traceloop.entity.input")
    content = _first(get, "gen_ai.tool.call.result", "ai.toolCall.result", "output.value", "traceloop.entity.output")
    return ToolUse(
        None if call_id is None else str(call_id),
        None if arguments is None else _as_text(arguments),
        None if content is None else _as_text(content),
    )


def messages_of(value: Any, role: str) -> list[Message]:
    """Messages in a value or in its JSON text. role: of those that name none."""
    if isinstance(value, str):
        found = _parsed(value)
        value = [value] if found is None else found
    if isinstance(value, dict):
        value = value["messages"] if isinstance(value.get("messages"), list) else [value]
    if not isinstance(value, list):
        return []
    made: list[Message] = []
    for item in value:
        if isinstance(item, str):
            made.append(Message(role=role, content=item))
        elif isinstance(item, dict):
            made += _message(item, role)
    return made


def _told(said: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = said["attributes"]
    for event in said["events"]:
        if event["name"] in CONTENT_EVENTS:
            told = event["attributes"] | told
    return told


def _inputs(told: dict[str, Any]) -> list[Message]:
    made: list[Message] = []
    if system := told.get("gen_ai.system_instructions"):
        found = _parsed(system) if isinstance(system, str) else system
        made += _message({"role": "system", "parts": found if isinstance(found, list) else [system]}, "system")
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
        found = _parsed(value) if isinstance(value, str) else value
        reasons = [m.get("finish_reason") for m in found if isinstance(m, dict)] if isinstance(found, list) else []
        return messages_of(value, "assistant"), reasons
    for prefix in ("gen_ai.completion", "llm.output_messages"):
        if items := _unflattened(told, prefix):
            return messages_of(items, "assistant"), [item.get("finish_reason") for item in items]
    if told.get("ai.response.text") or told.get("ai.response.toolCalls"):
        calls = told.get("ai.response.toolCalls")
        item = {"content": told.get("ai.response.text"), "tool_calls": _parsed(calls) if calls else None}
        return _message(item, "assistant"), []
    for key in ("gen_ai.completion", "output.value"):
        if value := told.get(key):
            return _answers(value)
    return [], []


def _answers(value: Any) -> tuple[list[Message], list[Any]]:
    found = _parsed(value) if isinstance(value, str) else value
    choices = found.get("choices") if isinstance(found, dict) else None
    if isinstance(choices, list):  # the answer of a chat completions endpoint, as it came
        choices = [choice for choice in choices if isinstance(choice, dict)]
        messages = [message for choice in choices for message in messages_of(choice.get("message"), "assistant")]
        return messages, [choice.get("finish_reason") for choice in choices]
    is_message = isinstance(found, list) or (isinstance(found, dict) and found.keys() & {"role", "content", "messages"})
    return messages_of(found if is_message else [_as_text(value)], "assistant"), []


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
            message = _parsed(message) or {"content": message} if isinstance(message, str) else message
            answered += _message(message if isinstance(message, dict) else item, role)
        else:
            heard += _message(item, role)
    return heard, answered, reasons


def _message(item: dict[str, Any], default: str) -> list[Message]:
    if isinstance(item.get("message"), dict):
        item = item["message"]
    role = str(item.get("role") or default)
    role = {"function": "tool", "model": "assistant", "ai": "assistant", "human": "user"}.get(role, role)
    name = item.get("name") if isinstance(item.get("name"), str) else None
    texts: list[str] = []
    thoughts = [item[key] for key in ("reasoning_content", "reasoning") if isinstance(item.get(key), str)][:1]
    calls: list[ToolCall] = []
    results: list[Message] = []
    for part in _parts(item):
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            continue
        part = part["message_content"] if isinstance(part.get("message_content"), dict) else part
        kind = str(part.get("type"))
        if kind in CALLS:
            calls.append(_call(part, len(calls)))
        elif kind in RESULTS:
            held = _first(part.get, "result", "response", "content", "output")
            call_id = _id(part, "id", "tool_use_id", "toolCallId", "call_id") or _id(item, "tool_call_id")
            results.append(
                Message(role="tool", content=_content(held), tool_call_id=call_id, name=_id(part, "toolName"))
            )
        elif kind in REASONING:
            thoughts.append(str(_first(part.get, "content", "text", "thinking") or ""))
        elif isinstance(text := _first(part.get, "text", "content"), str):
            texts.append(text)
    listed = item.get("tool_calls")
    listed = _parsed(listed) if isinstance(listed, str) else listed
    listed = listed if isinstance(listed, list) else []
    calls += [_call(call, len(calls) + n) for n, call in enumerate(listed) if isinstance(call, dict)]
    if isinstance(item.get("function_call"), dict):
        calls.append(_call(item["function_call"], len(calls)))
    content = "".join(texts)
    if role == "tool" and not results:
        return [Message(role=role, content=content, tool_call_id=_id(item, "tool_call_id", "id"), name=name)]
    if results and not content and not calls:
        return [message.model_copy(update={"name": message.name or name}) for message in results]
    ids = item.get("token_ids")
    token_ids = tuple(ids) if isinstance(ids, list) and {*map(type, ids)} <= {int} else ()
    made = Message(
        role=role, content=content, reasoning="".join(thoughts), tool_calls=tuple(calls), name=name, token_ids=token_ids
    )
    return [*results, made]


def _parts(item: dict[str, Any]) -> list[Any]:
    held = _first(item.get, "parts", "content", "contents")
    if isinstance(held, str) and held.startswith("[{"):
        found = _parsed(held)
        if isinstance(found, list) and all(isinstance(part, dict) and "type" in part for part in found):
            return found
    if isinstance(held, dict):
        return [held] if "type" in held or "text" in held else [_as_text(held)]
    return held if isinstance(held, list) else [] if held is None else [_as_text(held)]


def _call(part: dict[str, Any], n: int) -> ToolCall:
    part = part["tool_call"] if isinstance(part.get("tool_call"), dict) else part
    function = part["function"] if isinstance(part.get("function"), dict) else part
    held = _first(function.get, "arguments", "input", "args")
    arguments = "{}" if held is None else _as_text(held)
    error = part.get("error") if isinstance(part.get("error"), str) else None
    if isinstance(held, str) and error is None:
        try:
            json.loads(held)
        except (ValueError, RecursionError) as problem:
            error = f"arguments are no JSON: {problem}"
    call_id = _id(part, "id", "toolCallId", "call_id") or f"call_{n}"
    return ToolCall(
        id=call_id, name=str(_first(function.get, "name", "toolName") or ""), arguments=arguments, error=error
    )


def _content(held: Any) -> str:
    """Text, or the text of parts, or JSON."""
    if isinstance(held, list) and held and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in held):
        return "".join(part["text"] for part in held)
    if isinstance(held, dict) and held.keys() == {"type", "value"}:  # what the AI SDK wraps a result in
        held = held["value"]
    return "" if held is None else _as_text(held)


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


def _first(get: Any, *keys: str) -> Any:
    return next((value for key in keys if (value := get(key)) is not None), None)


def _id(item: dict[str, Any], *keys: str) -> str | None:
    value = _first(item.get, *keys)
    return None if value in (None, "") else str(value)


def _parsed(text: Any) -> Any:
    """An object or a list; None when the text is neither."""
    if not isinstance(text, str) or text[:1] not in ("[", "{"):
        return None
    try:
        return orjson.loads(text)
    except ValueError:
        return None


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=repr)
    except (ValueError, RecursionError):
        return repr(value)
