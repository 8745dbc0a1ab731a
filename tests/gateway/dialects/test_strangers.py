"""What strangers send: a request, an answer or a stream with anything in the place of anything."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentloop.gateway.dialects import chat, messages, responses
from agentloop.gateway.dialects.dialect import BadAnswer, BadRequest, Dialect
from tests.gateway.dialects.chats import Json, answers, cut, events, streamed

pytestmark = pytest.mark.slow

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.sampled_from(["", "text", "user"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["type", "role", "content", "text", "id", "index"]), inner, max_size=3)
    ),
    max_leaves=5,
)
TOOL = {"name": "sh", "description": "d", "strict": True}
REQUESTS: list[tuple[Dialect, Json]] = [
    (chat, {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream_options": {"include_usage": True}}),
    (
        messages,
        {
            "model": "m",
            "max_tokens": 9,
            "system": [{"type": "text", "text": "be"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "tool_use", "id": "a", "name": "sh", "input": {"c": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "a", "content": "x", "is_error": True},
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
                        {"type": "document", "title": "t", "source": {"type": "text", "data": "d"}},
                        {
                            "type": "search_result",
                            "title": "t",
                            "source": "u",
                            "content": [{"type": "text", "text": ""}],
                        },
                    ],
                },
            ],
            "tools": [{**TOOL, "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "sh", "disable_parallel_tool_use": True},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
            "metadata": {"user_id": "u"},
            "stop_sequences": ["x"],
            "stream": True,
        },
    ),
    (
        responses,
        {
            "model": "m",
            "instructions": "be",
            "input": [
                {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_image", "image_url": "u", "detail": "low"}],
                },
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "a", "name": "sh", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_file", "file_data": "d"}]},
            ],
            "tools": [{**TOOL, "type": "function", "parameters": {}}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "sh"}]},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "low"},
            "reasoning": {"effort": "low"},
            "include": ["message.output_text.logprobs"],
            "stream": True,
        },
    ),
]
each = pytest.mark.parametrize(("dialect", "body"), REQUESTS, ids=[dialect.name for dialect, _ in REQUESTS])


def spots(value: Any) -> list[tuple[Any, Any]]:
    """(what holds it, its key) of every value within."""
    held = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [spot for key, inner in held for spot in [(value, key), *spots(inner)]]


@st.composite
def spoilt(draw: st.DrawFn, value: Any) -> Any:
    """A copy with one or two values in it replaced or missing."""
    made = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 2))):
        if found := spots(made):
            holder, key = draw(st.sampled_from(found))
            if draw(st.booleans()):
                holder[key] = draw(JSON)
            else:
                del holder[key]
    return made


@each
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), record=st.booleans())
def test_a_request_is_translated_or_refused(dialect: Dialect, body: Json, data: st.DataObject, record: bool) -> None:
    given_body = data.draw(spoilt(body))
    before = copy.deepcopy(given_body)
    try:
        made = dialect.to_chat(given_body, record=record)
    except BadRequest as error:
        orjson.dumps(dialect.error(400, str(error)))
    else:
        assert made["messages"]
        assert all(isinstance(message["role"], str) for message in made["messages"])
        orjson.dumps(made)
        # An answer repeats what was asked, whatever that was.
        answer = {"choices": [{"message": {"content": "ok"}, "finish_reason": "stop"}]}
        orjson.dumps(dialect.from_chat(answer, given_body))
        streamed(dialect.encoder(given_body), [{"choices": [{"delta": {"content": "ok"}}]}])
    assert given_body == before


@each
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_an_answer_is_translated_or_called_bad(dialect: Dialect, body: Json, data: st.DataObject) -> None:
    answer = data.draw(answers())
    for translate, whole in (
        (lambda said: dialect.from_chat(said, body), answer),
        (dialect.answer_to_chat, dialect.from_chat(answer, body)),
    ):
        said = data.draw(spoilt(whole))
        before = copy.deepcopy(said)
        with contextlib.suppress(BadAnswer):
            orjson.dumps(translate(said))
        assert said == before


@each
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_stream_is_translated_or_called_bad(dialect: Dialect, body: Json, data: st.DataObject) -> None:
    chunks = data.draw(answers().flatmap(cut))
    said = data.draw(spoilt(chunks))
    encoder, heard = dialect.encoder(body), dialect.listener(body)
    try:
        for chunk in said:
            if isinstance(chunk, dict):
                encoder.feed(chunk)
        encoder.end()
    except BadAnswer:
        encoder.fail(502, "the upstream sent an unreadable answer")
    for event in data.draw(spoilt(events(streamed(dialect.encoder(body), chunks)))):
        if isinstance(event, dict):
            heard.feed(event)
    orjson.dumps(heard.partial())
    heard.answer()
