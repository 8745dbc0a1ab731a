"""What a model was asked, in one form for all APIs, and what a stored trace says that it was asked: to be equal."""

from __future__ import annotations

import json
from typing import Any

Said = tuple[Any, ...]
"""(role, text), of an answer (role, text, calls as (id, name, arguments)), of a result (role, id of the call, text)."""


def asked(request: dict[str, Any], prefix: str = "") -> list[Said]:
    """The body of a request to OpenAI's chat or responses or to Anthropic's messages.

    prefix: what stands before the ids of calls in the trace, where a library has those of the items instead.
    """
    if "input" in request:
        return _joined([said for item in request["input"] for said in _item(item, prefix)])
    system = [("system", request["system"])] if "system" in request else []
    return system + [said for message in request["messages"] for said in _message(message)]


def told(trace: dict[str, Any], n: int) -> list[Said]:
    """What the model was told before its step `n`."""
    made: list[Said] = [(message["role"], message["content"]) for message in trace["messages"]]
    for step in trace["steps"][: n + 1]:
        made += [(message["role"], message["content"]) for message in step["heard"]]
        if step["index"] == n:
            break
        answer = step["completion"]["message"]
        calls = [(call["id"], call["name"], json.loads(call["arguments"])) for call in answer["tool_calls"]]
        made.append(("assistant", answer["content"], calls))
        made += [("tool", result["call_id"], result["content"]) for result in step["results"]]
    return made


def _item(item: dict[str, Any], prefix: str) -> list[Said]:
    match item.get("type", "message"):
        case "message" if item["role"] == "assistant":
            return [("assistant", "".join(part["text"] for part in item["content"]), [])]
        case "message":
            return [(item["role"], item["content"])]
        case "function_call":
            return [("assistant", "", [(prefix + item["call_id"], item["name"], json.loads(item["arguments"]))])]
        case "function_call_output":
            return [("tool", prefix + item["call_id"], item["output"])]
    raise AssertionError(item)


def _joined(said: list[Said]) -> list[Said]:
    """The items of one answer are one."""
    made: list[Said] = []
    for one in said:
        if one[0] == "assistant" and made and made[-1][0] == "assistant":
            made[-1] = ("assistant", made[-1][1] + one[1], made[-1][2] + one[2])
        else:
            made.append(one)
    return made


def _message(message: dict[str, Any]) -> list[Said]:
    role, content = message["role"], message["content"]
    if role == "tool":
        return [(role, message["tool_call_id"], content)]
    if role == "assistant" and isinstance(content, str):
        calls = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
        return [(role, content, [(id_, call["name"], json.loads(call["arguments"])) for id_, call in calls])]
    if isinstance(content, str):
        return [(role, content)]
    if role == "user":
        return [("tool", block["tool_use_id"], block["content"]) for block in content]
    text = "".join(block["text"] for block in content if block["type"] == "text")
    calls = [(block["id"], block["name"], block["input"]) for block in content if block["type"] == "tool_use"]
    return [(role, text, calls)]
