"""Requests of the messages API as chat requests. Expected values by hand from both APIs' references."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParams
from pydantic import TypeAdapter

from agentloop.gateway.dialects import messages
from agentloop.gateway.dialects.dialect import BadRequest, Unsupported
from tests.gateway.dialects.chats import Json

CHAT: TypeAdapter[Any] = TypeAdapter(CompletionCreateParams)
TOOL = {"name": "sh", "description": "run", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
PNG = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def text(said: str) -> Json:
    return {"type": "text", "text": said}


def use(call_id: str, **given: Any) -> Json:
    return {"type": "tool_use", "id": call_id, "name": "sh", "input": given}


def result(call_id: str, content: Any, **more: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def call(call_id: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": "sh", "arguments": arguments}}


def chat(*said: Json, **more: Any) -> Json:
    made = messages.to_chat({"model": "m", "max_tokens": 9, "messages": list(said), **more})
    # pydantic checks the lists of a TypedDict when they are read.
    checked = CHAT.validate_python(made)
    for name in ("messages", "tools"):
        list(checked.get(name, ()))
    return made


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


def assistant(content: Any) -> Json:
    return {"role": "assistant", "content": content}


SAID = [
    (user("hi"), [{"role": "user", "content": "hi"}]),
    (user([text("a"), text("b")]), [{"role": "user", "content": "a\nb"}]),
    (user([text("see"), {"type": "image", "source": PNG}]), [{"role": "user", "content": [text("see"), IMAGE]}]),
    (
        user([{"type": "image", "source": {"type": "url", "url": "https://x.test/y.png"}}]),
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x.test/y.png"}}]}],
    ),
    (
        user([{"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}]),
        [
            {
                "role": "user",
                "content": [
                    {
                        "type": "file",
                        "file": {"filename": "document.pdf", "file_data": "data:application/pdf;base64,AA=="},
                    }
                ],
            }
        ],
    ),
    (
        user([{"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}]),
        [{"role": "user", "content": "T\nd"}],
    ),
    (
        user([{"type": "document", "source": {"type": "content", "content": [text("d"), text("e")]}}]),
        [{"role": "user", "content": "d\ne"}],
    ),
    (
        user([{"type": "search_result", "title": "T", "source": "u", "content": [text("found")]}]),
        [{"role": "user", "content": "T (u)\nfound"}],
    ),
    (
        assistant(
            [{"type": "thinking", "thinking": "hm", "signature": "s"}, text("a"), text("b"), use("t", c="ls -l")]
        ),
        [
            {
                "role": "assistant",
                "content": "ab",
                "reasoning_content": "hm",
                "tool_calls": [call("t", '{"c": "ls -l"}')],
            }
        ],
    ),
    (
        assistant([{"type": "redacted_thinking", "data": "x"}, use("t"), use("u", c="é")]),
        [{"role": "assistant", "content": None, "tool_calls": [call("t", "{}"), call("u", '{"c": "é"}')]}],
    ),
    (
        user([text("and"), result("t", "out"), result("u", [text("x"), text("y")])]),
        [
            {"role": "tool", "tool_call_id": "t", "content": "out"},
            {"role": "tool", "tool_call_id": "u", "content": "x\ny"},
            {"role": "user", "content": "and"},
        ],
    ),
    (
        user([result("t", "boom", is_error=True), result("u", "error: no", is_error=True), result("v", None)]),
        [
            {"role": "tool", "tool_call_id": "t", "content": "Error: boom"},
            {"role": "tool", "tool_call_id": "u", "content": "error: no"},
            {"role": "tool", "tool_call_id": "v", "content": ""},
        ],
    ),
    (
        user([result("t", [text("x"), {"type": "image", "source": PNG}]), text("go on")]),
        [
            {"role": "tool", "tool_call_id": "t", "content": "x"},
            {"role": "user", "content": [text("Shown by tool call t:"), IMAGE, text("go on")]},
        ],
    ),
    ({"role": "system", "content": "now"}, [{"role": "system", "content": "now"}]),
]


@pytest.mark.parametrize(("said", "expected"), SAID)
def test_messages(said: Json, expected: list[Json]) -> None:
    assert chat(said)["messages"] == expected


OPTIONS: list[tuple[Json, Json]] = [
    ({"system": "be"}, {}),
    (
        {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "stop_sequences": ["X"]},
        {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "stop": ["X"]},
    ),
    ({"metadata": {"user_id": "u"}}, {"user": "u"}),
    ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
    ({"stream": False}, {"stream": False}),
    ({"tools": []}, {}),
    ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
            }
        },
    ),
    (
        {name: {} for name in ("cache_control", "thinking", "service_tier", "context_management", "speed")},
        {},
    ),
    ({"chat_template_kwargs": {"a": 1}, "seed": 3}, {"chat_template_kwargs": {"a": 1}, "seed": 3}),
    ({"mcp_servers": [], "container": None}, {"mcp_servers": [], "container": None}),
]


@pytest.mark.parametrize(("given", "expected"), OPTIONS)
def test_options(given: Json, expected: Json) -> None:
    made = chat(user("hi"), **given)
    said = made.pop("messages")
    assert said[-1] == user("hi")
    assert (len(said) == 2) == ("system" in given)
    assert made == {"model": "m", "max_completion_tokens": 9, **expected}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, {}),
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"type": "tool", "name": "sh", "disable_parallel_tool_use": False},
            {"tool_choice": {"type": "function", "function": {"name": "sh"}}, "parallel_tool_calls": True},
        ),
    ],
)
def test_tools(choice: Json | None, expected: Json) -> None:
    made = chat(user("hi"), tools=[TOOL, {**TOOL, "strict": True, "type": "custom"}], tool_choice=choice)
    function = {"name": "sh", "description": "run", "parameters": {"type": "object"}}
    assert made.pop("tools") == [
        {"type": "function", "function": function},
        {"type": "function", "function": {**function, "strict": True}},
    ]
    del made["messages"]
    assert made == {"model": "m", "max_completion_tokens": 9, **expected}


def test_system_blocks_are_one_text() -> None:
    cached = {**text("b"), "cache_control": {"type": "ephemeral"}}
    assert chat(user("hi"), system=[text("a"), cached])["messages"][0] == {"role": "system", "content": "a\nb"}


UNSUPPORTED: list[tuple[str, Json, Json]] = [
    ("tools.0.type", user("hi"), {"tools": [{"type": "web_search_20250305", "name": "kept"}]}),
    ("tools.0.type", user("hi"), {"tools": [{"type": "bash_20250124", "name": "kept"}]}),
    ("container", user("hi"), {"container": "kept"}),
    ("mcp_servers", user("hi"), {"mcp_servers": [{"url": "kept"}]}),
    ("messages.0.content.0", user([{"type": "image", "source": {"type": "file", "file_id": "kept"}}]), {}),
    ("messages.0.content.0", user([{"type": "document", "source": {"type": "url", "url": "kept"}}]), {}),
    ("messages.0.content.0", user([{"type": "container_upload", "file_id": "kept"}]), {}),
    ("messages.0.content.0", assistant([{"type": "server_tool_use", "id": "s", "name": "kept", "input": {}}]), {}),
    ("messages.0.content.0.content.0", user([result("t", [{"type": "tool_reference", "tool_name": "kept"}])]), {}),
]


@pytest.mark.parametrize(("field", "said", "more"), UNSUPPORTED)
def test_what_chat_cannot_say_is_refused_and_recorded(field: str, said: Json, more: Json) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [said], **more}
    with pytest.raises(Unsupported, match="chat completions cannot express") as caught:
        messages.to_chat(body)
    assert caught.value.field == field
    assert "kept" in str(messages.to_chat(body, record=True))


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("messages", {}),
        ("messages", {"messages": []}),
        ("messages", {"messages": "hi"}),
        ("messages.0", {"messages": ["hi"]}),
        ("messages.0.role", {"messages": [{"role": "tool", "content": ""}]}),
        ("messages.0.content", {"messages": [user(4)]}),
        ("messages.0.content.0.type", {"messages": [user([{}])]}),
        ("messages.0.content.0.text", {"messages": [user([{"type": "text"}])]}),
        ("messages.0.content.0.source", {"messages": [user([{"type": "image"}])]}),
        ("messages.0.content.0.input", {"messages": [assistant([{"type": "tool_use", "input": "ls"}])]}),
        ("messages.0.content.0.tool_use_id", {"messages": [user([{"type": "tool_result"}])]}),
        ("tools.0.input_schema", {"messages": [user("")], "tools": [{"name": "x"}]}),
        ("tool_choice.type", {"messages": [user("")], "tools": [TOOL], "tool_choice": {"type": "all"}}),
        ("metadata", {"messages": [user("")], "metadata": "u"}),
        ("output_config.format.type", {"messages": [user("")], "output_config": {"format": {}}}),
    ],
)
def test_what_cannot_be_read_says_where(field: str, body: Json) -> None:
    with pytest.raises(BadRequest) as caught:
        messages.to_chat(body)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
