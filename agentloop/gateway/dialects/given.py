"""Values of a request that a stranger sent, checked as they are read, and the parts of chat messages made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

from agentloop.gateway.dialects.dialect import BadRequest, Json, Unsupported

Keep = Callable[[str, str, Any], str]
"""(field, what it is, value) -> text in its place, for what chat has no form for."""


def refuse(field: str, what: str, value: Any) -> str:
    raise Unsupported(
        field, f"chat completions have no form for {what}; leave it out, or use a model whose server speaks this API"
    )


def as_text(field: str, what: str, value: Any) -> str:
    return dumped(value, field)


def text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(field, f"{type(value).__name__} where text should be")
    return value


def table(value: Any, field: str) -> Json:
    if not isinstance(value, dict):
        raise BadRequest(field, f"{type(value).__name__} where an object should be")
    return value


def array(value: Any, field: str) -> list[Any]:
    """A list; nothing for null."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest(field, f"{type(value).__name__} where a list should be")
    return value


def only(value: Any, field: str, known: Collection[str]) -> str:
    if not isinstance(value, str) or value not in known:
        raise BadRequest(field, f"{value!r:.60} is none of {', '.join(sorted(known))}")
    return value


def dumped(value: Any, field: str) -> str:
    """JSON as models write it: a space behind commas and colons."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRequest(field, f"no JSON: {error}") from None


def text_part(said: str) -> Json:
    return {"type": "text", "text": said}


def image_part(url: str, detail: Any = None) -> Json:
    image = {"url": url}
    if isinstance(detail, str):
        image["detail"] = detail
    return {"type": "image_url", "image_url": image}


def file_part(data_url: str, name: str) -> Json:
    return {"type": "file", "file": {"filename": name, "file_data": data_url}}


def joined(parts: list[Json]) -> str | list[Json]:
    """A message's content: one text where there is nothing else, which every server takes; lines as vLLM joins them."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def tool_messages(call_id: str, parts: list[Json], *, failed: bool = False) -> tuple[Json, list[Json]]:
    """A tool's result, and what of it goes to the user's message behind all results: a tool's message is only text."""
    said = "\n".join(part["text"] for part in parts if part["type"] == "text")
    if failed and not said.lower().startswith("error"):
        said = f"Error: {said}"  # chat has no field for it
    shown = [part for part in parts if part["type"] != "text"]
    if shown:
        shown.insert(0, text_part(f"Shown by tool call {call_id}:"))
    return {"role": "tool", "tool_call_id": call_id, "content": said}, shown


def function_call(call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
