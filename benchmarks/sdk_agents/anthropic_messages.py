"""An agent with the Anthropic SDK, whose system prompt is in blocks, the last of them cached."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic
from zoo import DESCRIPTION, MAX_TURNS, MODEL, SCHEMA, SYSTEM, count

TOOLS: Any = [{"name": "count", "description": DESCRIPTION, "input_schema": SCHEMA}]
BLOCKS: Any = [{"type": "text", "text": text} for text in SYSTEM.split("\n\n")]
BLOCKS[-1]["cache_control"] = {"type": "ephemeral"}


def run(question: str) -> str:
    """Its answer."""
    messages: list[Any] = [{"role": "user", "content": question}]
    with Anthropic() as client:
        for _ in range(MAX_TURNS):
            answer = client.messages.create(model=MODEL, max_tokens=500, system=BLOCKS, messages=messages, tools=TOOLS)
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in answer.content if block.type == "text")
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": count(**call.input)} for call in calls
            ]
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    return ""
