"""Requests of the responses API as chat requests. Expected values by hand from both APIs' references."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParams
from pydantic import TypeAdapter

from agentloop.gateway.dialects import responses
from agentloop.gateway.dialects.dialect import BadRequest, Unsupported
from tests.gateway.dialects.chats import Json

CHAT: TypeAdapter[Any] = TypeAdapter(CompletionCreateParams)
TOOL = {"type": "function", "name": "sh", "description": "run", "parameters": {"type": "object"}, "strict": True}
OTHER = {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": None}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"}
SHOWN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}


def chat(given: Any, **more: Any) -> Json:
    made = responses.to_chat({"model": "m", "input": given, **more})
    checked = CHAT.validate_python(made)
    for name in ("messages", "tools"):
        list(checked.get(name, ()))
    return made


def said(role: str, content: Any) -> Json:
    return {"type": "message", "role": role, "content": content}


def answered(text: str) -> Json:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}


def called(call_id: str, arguments: str = "{}") -> Json:
    return {"type": "function_call", "id": "fc", "call_id": call_id, "name": "sh", "arguments": arguments}


def output(call_id: str, out: Any) -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": out}


def thought(**given: Any) -> Json:
    return {"type": "reasoning", "id": "rs", "summary": [], **given}


def call(call_id: str, arguments: str = "{}") -> Json:
    return {"id": call_id, "type": "function", "function": {"name": "sh", "arguments": arguments}}


def tool(call_id: str, content: str) -> Json:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


def system(content: str) -> Json:
    return {"role": "system", "content": content}


def assistant(content: str | None, **more: Any) -> Json:
    return {"role": "assistant", "content": content, **more}


INPUTS: list[tuple[Any, list[Json]]] = [
    ("hi", [user("hi")]),
    ([{"role": "user", "content": "hi"}], [user("hi")]),
    ([said("user", [{"type": "input_text", "text": "see"}, IMAGE])], [user([{"type": "text", "text": "see"}, SHOWN])]),
    (
        [said("user", [{"type": "input_file", "filename": "a.pdf", "file_data": "data:x"}])],
        [user([{"type": "file", "file": {"filename": "a.pdf", "file_data": "data:x"}}])],
    ),
    (
        [
            {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "*** é"},
            {"type": "custom_tool_call_output", "call_id": "a", "output": "done"},
        ],
        [
            assistant(
                None,
                tool_calls=[
                    {
                        "id": "a",
                        "type": "function",
                        "function": {"name": "patch", "arguments": '{"input": "*** é"}'},
                    }
                ],
            ),
            tool("a", "done"),
        ],
    ),
    # What instructs at the beginning is one system message, what comes later stays where it is.
    (
        [said("developer", "a"), said("system", "b"), said("user", "hi"), said("developer", "c")],
        [system("a\n\nb"), user("hi"), system("c")],
    ),
    # A turn is one message, with its two calls at once or one after another.
    (
        [
            said("user", "hi"),
            thought(content=[{"type": "reasoning_text", "text": "hm"}]),
            answered("ok"),
            called("a", '{"c": 1}'),
            called("b"),
            output("a", "x"),
            output("b", [{"type": "input_text", "text": "y"}, {"type": "input_text", "text": "z"}]),
            answered("done"),
        ],
        [
            user("hi"),
            assistant("ok", reasoning_content="hm", tool_calls=[call("a", '{"c": 1}'), call("b")]),
            tool("a", "x"),
            tool("b", "y\nz"),
            assistant("done"),
        ],
    ),
    (
        [called("a"), output("a", "x"), called("b"), output("b", "y")],
        [
            assistant(None, tool_calls=[call("a")]),
            tool("a", "x"),
            assistant(None, tool_calls=[call("b")]),
            tool("b", "y"),
        ],
    ),
    # A summary stands for what is not told; what is encrypted stands for nothing.
    ([thought(summary=[{"type": "summary_text", "text": "s"}]), called("a")],
     [assistant(None, reasoning_content="s", tool_calls=[call("a")])]),
    ([thought(encrypted_content="gAAA"), answered("ok")], [assistant("ok")]),
    ([thought(content=[{"type": "reasoning_text", "text": t}]) for t in "ab"] + [answered("ok")],
     [assistant("ok", reasoning_content="a\nb")]),
    # Two answers in a row stay two; text between a call and its output joins the call's message.
    ([answered("a"), answered("b")], [assistant("a"), assistant("b")]),
    ([called("a"), answered("b"), output("a", "x")], [assistant("b", tool_calls=[call("a")]), tool("a", "x")]),
    ([said("assistant", [{"type": "refusal", "refusal": "no"}])], [assistant("no")]),
    # A tool's message is only text: what it shows comes behind all outputs.
    (
        [called("a"), called("b"), output("a", [IMAGE]), output("b", "y"), said("user", "go on")],
        [
            assistant(None, tool_calls=[call("a"), call("b")]),
            tool("a", ""),
            tool("b", "y"),
            user([{"type": "text", "text": "Shown by tool call a:"}, SHOWN]),
            user("go on"),
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), INPUTS)
def test_input(given: Any, expected: list[Json]) -> None:
    assert chat(given)["messages"] == expected


def test_a_custom_tool_is_a_function_of_its_text() -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    custom = {"type": "custom", "name": "patch", "description": "Edits files.", "format": form}
    made = chat("hi", tools=[custom], tool_choice={"type": "custom", "name": "patch"})
    described = 'Edits files.\n\nThe input follows this grammar (lark):\nstart: "x"'
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    function = {"name": "patch", "description": described, "parameters": parameters}
    assert made["tools"] == [{"type": "function", "function": function}]
    assert made["tool_choice"] == {"type": "function", "function": {"name": "patch"}}


def test_instructions_come_before_all_that_instructs() -> None:
    made = chat([said("developer", "a"), said("user", "hi")], instructions="be")
    assert made["messages"] == [system("be\n\na"), user("hi")]


def test_leading_messages_that_show_something_stay_as_they_are() -> None:
    shows = [{"type": "input_image", "image_url": "https://example.com/a.png"}]
    made = chat([said("developer", shows), said("user", "hi")], instructions="be")
    assert [message["role"] for message in made["messages"]] == ["system", "system", "user"]
    assert made["messages"][0] == system("be")
    assert made["messages"][1]["content"][0]["type"] == "image_url"


FUNCTIONS = [
    {"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}},
    {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}},
]
SCHEMA = {"name": "n", "schema": {"type": "object"}, "strict": True}
OPTIONS: list[tuple[Json, Json]] = [
    ({"max_output_tokens": 9, "temperature": 0.5, "top_p": 0.9, "user": "u"},
     {"max_completion_tokens": 9, "temperature": 0.5, "top_p": 0.9, "user": "u"}),
    ({"tools": [TOOL, OTHER], "tool_choice": "required", "parallel_tool_calls": False},
     {"tools": FUNCTIONS, "tool_choice": "required", "parallel_tool_calls": False}),
    ({"tools": [TOOL, OTHER], "tool_choice": {"type": "function", "name": "sh"}},
     {"tools": FUNCTIONS, "tool_choice": {"type": "function", "function": {"name": "sh"}}}),
    ({"tools": [TOOL, OTHER], "tool_choice": {"type": "allowed_tools", "mode": "required",
                                              "tools": [{"type": "function", "name": "read"}]}},
     {"tools": FUNCTIONS[1:], "tool_choice": "required"}),
    ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {"verbosity": "low"}),
    ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    ({"text": {"format": {"type": "json_schema", **SCHEMA}}},
     {"response_format": {"type": "json_schema", "json_schema": SCHEMA}}),
    ({"reasoning": {"effort": "high", "summary": "auto"}}, {"reasoning_effort": "high"}),
    ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
    ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
    ({"include": ["message.output_text.logprobs"]}, {"logprobs": True, "top_logprobs": 0}),
    ({"include": ["reasoning.encrypted_content"], "store": False, "metadata": {"a": "b"}, "truncation": "auto",
      "service_tier": "flex", "prompt_cache_key": "k", "previous_response_id": None, "background": False}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), OPTIONS)
def test_options(given: Json, expected: Json) -> None:
    assert chat("hi", **given) == {"model": "m", "messages": [user("hi")], **expected}


UNSUPPORTED: list[tuple[str, Json]] = [
    ("previous_response_id", {"input": "hi", "previous_response_id": "resp_1"}),
    ("conversation", {"input": "hi", "conversation": "conv_1"}),
    ("background", {"input": "hi", "background": True}),
    ("prompt", {"input": "hi", "prompt": {"id": "pmpt_1"}}),
    ("tools.0.type", {"input": "hi", "tools": [{"type": "web_search"}]}),
    ("tools.0.type", {"input": "hi", "tools": [{"type": "namespace", "name": "apply_patch"}]}),
    ("tool_choice.type", {"input": "hi", "tools": [TOOL], "tool_choice": {"type": "web_search_preview"}}),
    ("input.0", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
    ("input.0", {"input": [{"type": "web_search_call", "id": "ws_1", "status": "completed"}]}),
    ("input.0.content.0", {"input": [said("user", [{"type": "input_image", "file_id": "file_1"}])]}),
]


@pytest.mark.parametrize(("field", "body"), UNSUPPORTED)
def test_what_chat_cannot_say_is_refused_and_recorded(field: str, body: Json) -> None:
    with pytest.raises(Unsupported, match="chat completions cannot express") as caught:
        responses.to_chat(body)
    assert caught.value.field == field
    recorded = str(responses.to_chat(body, record=True))
    for needle in ("resp_1", "conv_1", "pmpt_1", "apply_patch", "web_search", "msg_1", "ws_1", "file_1"):
        assert (needle in recorded) == (needle in str(body))


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("input", {}),
        ("input", {"input": []}),
        ("input", {"input": 5}),
        ("input.0", {"input": [5]}),
        ("input.0.role", {"input": [{"role": "tool", "content": ""}]}),
        ("input.0.content", {"input": [said("user", 5)]}),
        ("input.0.content.0", {"input": [said("user", ["hi"])]}),
        ("input.0.call_id", {"input": [output(None, "x")]}),
        ("input.0.arguments", {"input": [{**called("a"), "arguments": {}}]}),
        ("tools.0.name", {"input": "hi", "tools": [{"type": "function"}]}),
        ("tool_choice", {"input": "hi", "tools": [TOOL], "tool_choice": "any"}),
        ("text.format.type", {"input": "hi", "text": {"format": {"type": "xml"}}}),
        ("instructions", {"input": "hi", "instructions": ["be"]}),
    ],
)
def test_what_cannot_be_read_says_where(field: str, body: Json) -> None:
    with pytest.raises(BadRequest) as caught:
        responses.to_chat(body)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
