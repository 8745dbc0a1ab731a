"""Laws of the streams: however an answer is cut, it says what the whole answer says."""

from __future__ import annotations

from typing import Any

import anthropic.types as anthropic_types
import openai.types.chat as chat_types
import openai.types.responses as responses_types
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from agentloop.gateway.dialects import chat, messages, responses
from agentloop.gateway.dialects.dialect import Dialect
from tests.gateway.dialects.chats import Json, answers, cut, events, streamed

DIALECTS: list[Dialect] = [chat, messages, responses]
BODIES: dict[str, Json] = {
    "chat": {"logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}},
    "messages": {"model": "policy/live", "max_tokens": 9},
    "responses": {"model": "policy/live", "input": "?", "top_logprobs": 1},
}
CHUNKED = answers().flatmap(lambda answer: st.tuples(st.just(answer), cut(answer)))
EVENTS: dict[str, TypeAdapter[Any]] = {
    "chat": TypeAdapter(chat_types.ChatCompletionChunk),
    "messages": TypeAdapter(anthropic_types.RawMessageStreamEvent),
    "responses": TypeAdapter(responses_types.ResponseStreamEvent),
}
ANSWERS: dict[str, TypeAdapter[Any]] = {
    "chat": TypeAdapter(chat_types.ChatCompletion),
    "messages": TypeAdapter(anthropic_types.Message),
    "responses": TypeAdapter(responses_types.Response),
}
each = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)


@pytest.mark.slow
@each
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=CHUNKED)
def test_a_stream_says_what_the_whole_answer_says(dialect: Dialect, drawn: tuple[Json, list[Json]]) -> None:
    answer, chunks = drawn
    body = BODIES[dialect.name]
    if dialect.name == "responses":
        body = {**body, "tools": [{"type": "custom", "name": "tool_1"}]}
    whole = dialect.from_chat(answer, body)
    ANSWERS[dialect.name].validate_python(whole)
    listener = dialect.listener(body)
    for event in events(streamed(dialect.encoder(body), chunks)):
        EVENTS[dialect.name].validate_python(event)
        assert listener.answer() is None or dialect.name == "chat"  # whose usage comes after the end
        listener.feed(event)
    heard = listener.answer()
    assert heard is not None
    if dialect.name == "responses" and answer["choices"][0]["logprobs"]:
        # Where tokens come on chunks that say nothing, there is no text event to put them on.
        for given_answer in (whole, heard):
            for item in given_answer["output"]:
                for part in item.get("content") or ():
                    part.pop("logprobs", None)
    if dialect.name == "chat":
        tokens, kept = whole["choices"][0], heard["choices"][0]
        said = [token["logprob"] for token in (tokens.pop("logprobs") or {"content": []})["content"]]
        assert [*(kept.pop("logprobs") or {"content": []})["content"]] == said
        assert [*kept.pop("token_ids", [])] == tokens.pop("token_ids", [])
    assert heard == whole


@pytest.mark.slow
@each
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(answers())
def test_an_answer_comes_back_as_the_chat_completion_that_it_was(dialect: Dialect, answer: Json) -> None:
    back = dialect.answer_to_chat(dialect.from_chat(answer, BODIES[dialect.name]))
    (was,), (now,) = answer["choices"], back["choices"]
    assert now["message"] == was["message"]
    assert now["finish_reason"] == was["finish_reason"]
    assert {**answer["usage"], "completion_tokens_details": None} == {
        **back["usage"],
        "completion_tokens_details": None,
    }
    chat_types.ChatCompletion.model_validate({**back, "id": "x"})


@pytest.mark.slow
@each
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=CHUNKED, data=st.data())
def test_a_stream_that_breaks_off_leaves_what_there_was(
    dialect: Dialect, drawn: tuple[Json, list[Json]], data: st.DataObject
) -> None:
    answer, chunks = drawn
    body = BODIES[dialect.name]
    last = next(n for n, chunk in enumerate(chunks) if chunk["choices"][0]["finish_reason"])
    encoder, listener = dialect.encoder(body), dialect.listener(body)
    said = chunks[: data.draw(st.integers(0, last))]
    sent = b"".join(encoder.feed(chunk) for chunk in said) + encoder.fail(529, "the upstream went away", "upstream")
    for event in events(sent):
        listener.feed(event)
    assert listener.answer() is None
    assert "the upstream went away" in str(listener.error)
    message = dialect.answer_to_chat(listener.partial())["choices"][:1] if said else []
    whole = answer["choices"][0]["message"]
    for choice in message:
        assert choice["finish_reason"] is None
        assert (whole["content"] or "").startswith(choice["message"]["content"] or "")
        assert whole.get("reasoning_content", "").startswith(choice["message"].get("reasoning_content", ""))


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=CHUNKED)
def test_a_client_sees_no_more_than_it_asked_for(drawn: tuple[Json, list[Json]]) -> None:
    answer, chunks = drawn
    sent = streamed(chat.encoder({}), chunks)
    assert sent.endswith(b"data: [DONE]\n\n")
    for event in [chat.from_chat(answer, {}), *events(sent)]:
        assert "prompt_token_ids" not in event
        for choice in event["choices"]:
            assert not choice.keys() & {"token_ids", "logprobs"}
    assert all("usage" not in event for event in events(sent))
    said = [
        c["choices"][0]["delta"] for c in chunks[:-1] if c["choices"][0]["delta"] or c["choices"][0]["finish_reason"]
    ]
    assert said == [e["choices"][0]["delta"] for e in events(sent)], "what came for its token's sake alone is passed on"


@pytest.mark.parametrize(
    "written",
    ["", "{", '{"path": "a", "text": "cut o', "[1]", "ls -l", "NaN", '{"a": NaN}', '{"a":' * 400 + "1" + "}" * 400],
)
def test_arguments_that_are_no_object_reach_the_tool_to_be_refused(written: str) -> None:
    """The API promises an object, and the SDK raises at JSON that is none, in the middle of a stream."""
    answer: Json = {"choices": [{"index": 0, "finish_reason": "tool_calls", "message": {"content": None}}]}
    function = {"name": "sh", "arguments": written}
    answer["choices"][0]["message"]["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
    (block,) = messages.from_chat(answer, {"model": "m"})["content"]
    assert block["input"] == ({"unreadable_arguments": written} if written else {})
    chunk = {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "c", "function": function}]}}]}
    listener = messages.listener({})
    for event in events(streamed(messages.encoder({}), [chunk])):
        listener.feed(event)
    assert listener.partial()["content"] == [block]
    back = messages.answer_to_chat(listener.partial())["choices"][0]["message"]["tool_calls"][0]["function"]
    assert back["arguments"] == (written or "{}")


def test_parallel_calls_that_all_have_the_index_0_stay_apart() -> None:
    """Gemini's endpoint numbers them so."""
    listener = chat.listener({})
    for n in range(2):
        call = {"index": 0, "id": f"id{n}", "function": {"name": "f", "arguments": f"{{{n}}}"}}
        listener.feed({"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]})
    answer = listener.answer()
    assert answer is not None
    calls = answer["choices"][0]["message"]["tool_calls"]
    assert [(call["id"], call["function"]["arguments"]) for call in calls] == [("id0", "{0}"), ("id1", "{1}")]


def test_several_choices_are_each_put_together_and_all_waited_for() -> None:
    listener = chat.listener({"n": 2})
    for index, piece, finish in [(0, "a", "stop"), (1, "b", None), (1, "c", None)]:
        listener.feed({"choices": [{"index": index, "delta": {"content": piece}, "finish_reason": finish}]})
        assert listener.answer() is None
    listener.feed({"choices": [{"index": 1, "delta": {}, "finish_reason": "length"}]})
    answer = listener.answer()
    assert answer is not None
    said = [(choice["message"]["content"], choice["finish_reason"]) for choice in answer["choices"]]
    assert said == [("a", "stop"), ("bc", "length")]


def test_what_a_done_item_says_counts_more_than_its_deltas() -> None:
    listener = responses.listener({})
    note = {"type": "url_citation", "url": "u", "title": "t", "start_index": 0, "end_index": 1}
    item = {"id": "msg", "type": "message", "role": "assistant", "status": "completed"}
    item["content"] = [{"type": "output_text", "text": "ab", "annotations": [note]}]
    listener.feed({"type": "response.output_item.added", "output_index": 0, "item": {**item, "content": []}})
    listener.feed({"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": "ab"})
    assert listener.partial()["output"][0]["content"][0]["text"] == "ab"
    listener.feed({"type": "response.output_item.done", "output_index": 0, "item": item})
    assert listener.partial()["output"] == [item]
    assert listener.answer() is None


def test_what_is_said_after_a_call_is_not_lost() -> None:
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    deltas: list[Json] = [{"content": "a"}, {"tool_calls": [call]}, {"content": "b"}, {"reasoning": "t"}]
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    for dialect in (messages, responses):
        listener = dialect.listener({})
        for event in events(streamed(dialect.encoder({}), chunks)):
            EVENTS[dialect.name].validate_python(event)
            listener.feed(event)
        message = dialect.answer_to_chat(listener.partial())["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"], len(message["tool_calls"])) == ("ab", "t", 1)
