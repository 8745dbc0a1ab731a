"""An agent with the OpenAI SDK: chat completions, streamed, with a tool."""

from __future__ import annotations

import json
from typing import Any

from openai import OpenAI
from zoo import DESCRIPTION, MAX_TURNS, MODEL, SCHEMA, SYSTEM, count

TOOLS: Any = [{"type": "function", "function": {"name": "count", "description": DESCRIPTION, "parameters": SCHEMA}}]


def run(question: str) -> str:
    """Its answer."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    with OpenAI() as client:
        for _ in range(MAX_TURNS):
            text, calls = "", dict[int, dict[str, str]]()
            for chunk in client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, stream=True):
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    for piece in choice.delta.tool_calls or ():
                        call = calls.setdefault(piece.index, {"id": "", "name": "", "arguments": ""})
                        call["id"] = piece.id or call["id"]
                        if piece.function is not None:
                            call["name"] += piece.function.name or ""
                            call["arguments"] += piece.function.arguments or ""
            if not calls:
                return text
            made = [
                {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
                for c in calls.values()
            ]
            messages.append({"role": "assistant", "content": text or None, "tool_calls": made})
            for each in calls.values():
                result = count(**json.loads(each["arguments"]))
                messages.append({"role": "tool", "tool_call_id": each["id"], "content": result})
    return ""
