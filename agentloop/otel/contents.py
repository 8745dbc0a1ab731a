"""What a span says, split into a small head and bodies that repeat from span to span, and put together again.

A head is JSON in which {"$": n} stands for the n-th body. Other keys that begin with `$` hold what JSON has no
word for: {"$bytes": base64}, {"$float": "nan"}, {"$map": an object that itself has such keys}, {"$json": [style,
value]} for text that was JSON written in that style, and {"$cat": [...]} for text with bodies in between.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from functools import partial
from math import isfinite
from typing import Any

import orjson

LISTS = frozenset(
    {
        "gen_ai.input.messages",
        "gen_ai.output.messages",
        "gen_ai.system_instructions",
        "gen_ai.tool.definitions",
        "gen_ai.prompt",
        "gen_ai.completion",
        "input.value",
        "output.value",
        "traceloop.entity.input",
        "traceloop.entity.output",
        "ai.prompt",
        "ai.prompt.messages",
        "ai.prompt.tools",
        "ai.response.toolCalls",
        "pydantic_ai.all_messages",
    }
)
"""Attributes that hold messages, or JSON text of them: each message is a body."""
WHOLE = frozenset(
    {
        "gen_ai.tool.call.arguments",
        "gen_ai.tool.call.result",
        "tool.parameters",
        "ai.response.text",
        "ai.toolCall.args",
        "ai.toolCall.result",
        "agentloop.token_ids.prompt",
        "agentloop.token_ids.completion",
        "agentloop.logprobs",
    }
)
"""Attributes that are one body."""
FLAT = (
    "gen_ai.prompt.",
    "gen_ai.completion.",
    "llm.input_messages.",
    "llm.output_messages.",
    "llm.tools.",
    "llm.request.functions.",
)
"""Beginnings of attributes that spread one message over many: those with one number are one body."""
MESSAGE_EVENTS = {
    "gen_ai.system.message": "system",
    "gen_ai.user.message": "user",
    "gen_ai.assistant.message": "assistant",
    "gen_ai.tool.message": "tool",
    "gen_ai.choice": "assistant",
}
"""Name of an event that is a message -> who says it."""
LONG = 2048
"""Characters above which any other text is a body too."""
MANY, SMALL = 1000, 24
"""Messages above which they are not split when they have fewer characters on average: that would cost more time
than a hostile request should get for its bytes."""
MAX_DEPTH = 64
"""Levels of objects and lists in one value; protobuf reads 47 at most."""

STYLES: dict[str, Callable[[Any], str]] = {
    "compact": lambda value: orjson.dumps(value).decode(),
    "spaced": json.dumps,
    "unicode": partial(json.dumps, ensure_ascii=False),
    "ascii": partial(json.dumps, separators=(",", ":")),
}
"""How people write JSON: JavaScript and Rust, Python, and Python told otherwise."""
_SIMPLE = {str, int, bool}
_FLAT_KEY = re.compile(r"(.+?)\.([0-9]+)\.(.+)", re.ASCII | re.DOTALL)
_GAP = re.compile(r"\s*,?\s*", re.ASCII)
_decoder = json.JSONDecoder()


def split(attributes: dict[str, Any], bodies: list[bytes]) -> dict[str, Any]:
    """`attributes`, and `flat` where there is any, as a head holds them; adds to `bodies`."""
    made: dict[str, Any] = {}
    flat: dict[str, dict[str, dict[str, Any]]] = {}
    for key, value in attributes.items():
        kind = type(value)
        if key in LISTS:
            made[key] = _messages(value, bodies)
        elif key in WHOLE or (kind is str and len(value) > LONG and not key.startswith(FLAT)):
            made[key] = body_of(value, bodies)
        elif key.startswith(FLAT) and (match := _FLAT_KEY.fullmatch(key)):
            prefix, n, rest = match.groups()
            flat.setdefault(prefix, {}).setdefault(n, {})[rest] = escaped(value)
        elif kind in _SIMPLE:
            made[key] = value
        else:
            made[key] = escaped(value)
    if not flat:
        return {"attributes": made}
    numbers = {prefix: {n: _add(rest, bodies) for n, rest in parts.items()} for prefix, parts in flat.items()}
    return {"attributes": made, "flat": numbers}


def split_event(name: str, attributes: dict[str, Any], bodies: list[bytes]) -> dict[str, Any]:
    """The same for the attributes of an event, which are one `body` when the event is a message."""
    return {"body": body_of(attributes, bodies)} if name in MESSAGE_EVENTS else split(attributes, bodies)


def joined(head: dict[str, Any], bodies: tuple[bytes, ...] = (), *, read: bool = False) -> dict[str, Any]:
    """The attributes that `split` or `split_event` took apart; takes their parts out of `head`.

    read: text that was JSON with messages is given as what it says, which is cheaper than to write it down again.
    """
    made = {
        key: unescaped(value["$json"][1], bodies, literal=True)
        if read and type(value) is dict and "$json" in value
        else unescaped(value, bodies)
        for key, value in head.pop("attributes", {}).items()
    }
    if "body" in head:
        made = unescaped(head.pop("body"), bodies)
    for prefix, parts in head.pop("flat", {}).items():
        for n, number in parts.items():
            for rest, value in orjson.loads(bodies[number]).items():
                made[f"{prefix}.{n}.{rest}"] = unescaped(value)
    return made


def escaped(value: Any, depth: int = 0) -> Any:
    """A value as a head or a body holds it. Raises ValueError for one that is nested too deeply."""
    kind = type(value)
    if value is None or kind in _SIMPLE:
        return value
    if kind is float:
        return value if isfinite(value) else {"$float": repr(value)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if depth >= MAX_DEPTH:
        raise ValueError(f"a value of more than {MAX_DEPTH} levels")
    if kind is list:
        return value if set(map(type, value)) <= _SIMPLE else [escaped(item, depth + 1) for item in value]
    made = {key: escaped(item, depth + 1) for key, item in value.items()}
    return {"$map": made} if any(key[:1] == "$" for key in made) else made


def unescaped(value: Any, bodies: tuple[bytes, ...] = (), *, literal: bool = False) -> Any:
    """The value that `escaped` was given. literal: bodies hold JSON as somebody wrote it, with nothing escaped."""
    if type(value) is list:
        if set(map(type, value)) <= _SIMPLE:
            return value
        return [unescaped(item, bodies, literal=literal) for item in value]
    if type(value) is not dict:
        return value
    if len(value) == 1:
        ((key, held),) = value.items()
        if key == "$":
            body = orjson.loads(bodies[held])
            return body if literal else unescaped(body, bodies)
        if key == "$json":
            return STYLES[held[0]](unescaped(held[1], bodies, literal=True))
        if key == "$cat":
            return "".join(part if type(part) is str else bodies[part["$"]].decode() for part in held)
        if key == "$bytes":
            return base64.b64decode(held)
        if key == "$float":
            return float(held)
        if key == "$map":
            value = held
    return {key: unescaped(item, bodies, literal=literal) for key, item in value.items()}


def dumped(value: Any) -> bytes:
    """JSON of `value`, in no more room than it needs: a result of orjson itself holds 4 KiB or more while it lives."""
    return b"".join((orjson.dumps(value), b""))  # a copy


def _add(value: Any, bodies: list[bytes]) -> int:
    bodies.append(dumped(value))
    return len(bodies) - 1


def body_of(value: Any, bodies: list[bytes]) -> dict[str, int]:
    """Adds `value` to `bodies`; what stands for it in a head."""
    return {"$": _add(escaped(value), bodies)}


def _messages(value: Any, bodies: list[bytes]) -> Any:
    if type(value) is list:
        return [body_of(item, bodies) if type(item) is dict else escaped(item) for item in value]
    if type(value) is not str or value[:1] not in ("[", "{"):
        return body_of(value, bodies)
    try:
        found = orjson.loads(value)
        messages = found if type(found) is list else found.get("messages")
        if type(messages) is not list or not messages or {*map(type, messages)} != {dict}:
            return body_of(value, bodies)
        if len(messages) > MANY and len(value) < SMALL * len(messages):
            return body_of(value, bodies)
        style = next((name for name, written in STYLES.items() if written(found) == value), None)
        if style:
            numbers = [{"$": _add(message, bodies)} for message in messages]
            if messages is found:
                return {"$json": [style, numbers]}
            rest = {key: numbers if key == "messages" else escaped(item) for key, item in found.items()}
            return {"$json": [style, rest]}
        return _cut(value, bodies) if messages is found else body_of(value, bodies)
    except (ValueError, TypeError, RecursionError):  # no JSON, or such that no writer of ours would bring it back
        return body_of(value, bodies)


def _cut(text: str, bodies: list[bytes]) -> Any:
    """JSON text of a list in somebody's own style, cut at the items."""
    parts: list[Any] = []
    items: list[bytes] = []
    at = start = 1
    while text[at : at + 1] != "]":
        at = _GAP.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
        if text[at : at + 1] == "]":
            break
        _, end = _decoder.raw_decode(text, at)
        parts += [text[start:at], {"$": len(bodies) + len(items)}]
        items.append(text[at:end].encode())
        at = start = end
    bodies += items
    return {"$cat": ["[", *parts, text[start:]]}
