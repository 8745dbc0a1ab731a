"""The kinds of item that the Responses API has, and what is in each."""

from __future__ import annotations

import json
from typing import Any

from agentloop.errors import FormatError
from agentloop.formats.chat import arguments
from agentloop.formats.fields import Fields
from agentloop.types import ToolCall

CALLS = {
    "function_call": "arguments",
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
    "computer_call": "action",
}
"""Calls that the client answers by an item of their own, and what they pass."""
HOSTED = {
    "mcp_call": ("arguments", "output"),
    "web_search_call": ("action", "results"),
    "file_search_call": ("queries", "results"),
    "code_interpreter_call": ("code", "outputs"),
    "image_generation_call": ("revised_prompt", "result"),
}
"""Calls that the endpoint itself answered, and where what they passed and what came back is."""
COMPACTED = {"compaction", "compaction_summary"}
NOTHING: tuple[Any, ...] = (None, "", [], {})
PARTS = {"input_text", "output_text", "input_image", "input_file", "refusal"}


def are_items(values: list[Any]) -> bool:
    """Whether all are messages or items of this API, and one of them can be nothing else."""
    return all(isinstance(value, dict) and _is_item(value) is not None for value in values) and any(
        _is_item(value) for value in values
    )


def _is_item(value: dict[str, Any]) -> bool | None:
    """None for no item, and False for a message that a chat could have, too."""
    kind = value.get("type", "message")
    if kind == "message" and isinstance(value.get("role"), str) and "content" in value:
        parts = value["content"] if isinstance(value["content"], list) else ()
        return any(isinstance(part, dict) and str(part.get("type")) in PARTS for part in parts)
    if kind == "reasoning" and isinstance(value.get("summary", value.get("content")), list):
        return True
    is_kind = isinstance(kind, str) and (
        kind in CALLS or kind in HOSTED or kind in COMPACTED or kind.endswith("_output")
    )
    return True if is_kind and ("call_id" in value or "id" in value) else None


def text(item: Fields, key: str) -> str:
    """Text, or the text of its parts; what else a part has (annotations, an image) stays in `left`."""
    value = item.take(key)
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise FormatError(f"{item.where}: {key}: neither text nor a list of parts")
    texts = []
    for n, part in enumerate(value):
        words = part if isinstance(part, str) else None
        if isinstance(part, dict):
            name = "refusal" if part.get("type") == "refusal" else "text"
            words = part[name] if isinstance(part.get(name), str) else None
            rest = {k: v for k, v in part.items() if (words is None or k not in (name, "type")) and v not in NOTHING}
        else:
            rest = {} if words is not None else part
        if words is not None:
            texts.append(words)
        if rest not in NOTHING:
            item.keep(f"{key}[{n}]", rest)
    return "".join(texts)


def call_of(item: Fields, kind: str, key: str, n: int) -> ToolCall:
    call_id = item.text("call_id")
    own = item.text("id")
    if call_id and own and own != call_id:
        item.keep("id", own)
    name = item.text("name") or kind.removesuffix("_call")
    if key in ("arguments", "action", "operation"):
        passed = arguments(item, key)
    else:  # plain text, which is no JSON and need be none
        passed = {"arguments": json.dumps({key: item.take(key)}, ensure_ascii=False)}
    return ToolCall(id=call_id or own or f"call_{n}", name=name, **passed)


def result_of(item: Fields) -> dict[str, Any]:
    """What `Steps.result` takes."""
    output = item.take("output")
    # of a shell there is for each command what it printed, and how it ended
    runs = [part for part in output if isinstance(part, dict) and "outcome" in part] if isinstance(output, list) else []
    ends = [run["outcome"] for run in runs if isinstance(run["outcome"], dict)]
    if runs:
        words = "".join(f"{run.get('stdout', '')}{run.get('stderr', '')}" for run in runs)
    elif isinstance(output, list):
        item.keep("output", output)
        words = text(item, "output")
    else:
        words = plain(output)
    codes = [end["exit_code"] for end in ends if isinstance(end.get("exit_code"), int)]
    timed_out = any(end.get("type") == "timeout" for end in ends)
    ok = item.peek("status") not in ("failed", "incomplete") and not timed_out and not any(codes)
    return {"content": words, "ok": ok, "timed_out": timed_out, "exit_code": codes[-1] if codes else None}


def plain(value: Any) -> str:
    """Text as it is, anything else as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)
