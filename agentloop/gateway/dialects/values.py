"""Checked values from a client's request, and the parts of chat messages that are built from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

from agentloop.gateway.dialects.dialect import BadRequest, Json, Unsupported

Keep = Callable[[str, str, Any], str]
"""(field, description, value) -> replacement text for a value that chat cannot express."""


def refuse(field: str, what: str, value: Any) -> str:
    raise Unsupported(
        field, f"chat completions cannot express {what}; remove it, or use a model whose server speaks this API"
    )


def as_text(field: str, what: str, value: Any) -> str:
    return dumped(value, field)


def text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(field, f"got {type(value).__name__}, expected text")
    return value


def table(value: Any, field: str) -> Json:
    if not isinstance(value, dict):
        raise BadRequest(field, f"got {type(value).__name__}, expected an object")
    return value


def array(value: Any, field: str) -> list[Any]:
    """A list; empty for null."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest(field, f"got {type(value).__name__}, expected a list")
    return value


def only(value: Any, field: str, options: Collection[str]) -> str:
    if not isinstance(value, str) or value not in options:
        raise BadRequest(field, f"got {value!r:.60}, expected one of {', '.join(sorted(options))}")
    return value


def dumped(value: Any, field: str) -> str:
    """JSON in the form in which models write it: with a space after commas and colons."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRequest(field, f"not JSON: {error}") from None


def text_part(words: str) -> Json:
    return {"type": "text", "text": words}


def image_part(url: str, detail: Any = None) -> Json:
    image = {"url": url}
    if isinstance(detail, str):
        image["detail"] = detail
    return {"type": "image_url", "image_url": image}


def file_part(data_url: str, name: str) -> Json:
    return {"type": "file", "file": {"filename": name, "file_data": data_url}}


def joined(parts: list[Json]) -> str | list[Json]:
    """A message's content. Text parts alone become one text, which every server accepts, joined as vLLM does it."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def tool_messages(call_id: str, parts: list[Json], *, failed: bool = False) -> tuple[Json, list[Json]]:
    """A tool's message, which can hold only text, and the other parts, for a user's message after all results."""
    content = "\n".join(part["text"] for part in parts if part["type"] == "text")
    if failed and not content.lower().startswith("error"):
        content = f"Error: {content}"  # chat has no field for a failed call
    attachments = [part for part in parts if part["type"] != "text"]
    if attachments:
        attachments.insert(0, text_part(f"Shown by tool call {call_id}:"))
    return {"role": "tool", "tool_call_id": call_id, "content": content}, attachments


def function_call(call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
