"""Custom tools of the responses API, which take plain text, as functions whose only argument is that text.

A grammar is described to the model, not enforced.
"""

from __future__ import annotations

import orjson

from agentloop.gateway.dialects.completion import object_of, table_of, tables, text_of
from agentloop.gateway.dialects.dialect import Json
from agentloop.gateway.dialects.values import dumped

PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def names_of(body: Json) -> set[str]:
    """The custom tools of a request."""
    return {text_of(tool, "name") for tool in tables(body, "tools") if tool.get("type") == "custom"}


def function_of(tool: Json) -> Json:
    description = text_of(tool, "description")
    form = table_of(tool, "format")
    if grammar := text_of(form, "definition"):
        description = f"{description}\n\nThe input follows this grammar ({text_of(form, 'syntax')}):\n{grammar}".strip()
    return {"name": tool.get("name"), "description": description, "parameters": PARAMETERS}


def arguments_of(words: str, field: str) -> str:
    return dumped({"input": words}, field)


def input_of(arguments: str) -> str:
    """The text argument; the model's output unchanged if it is not the expected object, for the tool to report."""
    try:
        value = orjson.loads(arguments)
    except ValueError:
        return arguments
    words = object_of(value).get("input")
    if not isinstance(words, str):
        return arguments
    return words
