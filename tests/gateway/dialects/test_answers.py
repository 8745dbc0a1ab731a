"""How answers end, in each dialect's words. Expected values by hand from the APIs' references."""

from __future__ import annotations

from typing import Any

import anthropic.types as anthropic_types
import openai.types.responses as responses_types
import pytest

from agentloop.gateway.dialects import chat, messages, responses
from agentloop.gateway.dialects.dialect import BadAnswer
from tests.gateway.dialects.chats import Json, events, logprob, streamed

CALL = {"id": "c", "type": "function", "function": {"name": "sh", "arguments": "{}"}}


def answer(message: Json, finish: str | None, **choice: Any) -> Json:
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish, **choice}]}


ENDS: list[tuple[Json, tuple[str, str | None], tuple[str, str | None]]] = [
    # (an answer, (stop_reason, stop_sequence) of messages, (status, incomplete reason) of responses)
    (answer({"content": "a"}, "stop"), ("end_turn", None), ("completed", None)),
    (answer({"content": "a"}, "stop", stop_reason="END"), ("stop_sequence", "END"), ("completed", None)),
    (answer({"content": "a"}, "stop", stop_reason=151643), ("end_turn", None), ("completed", None)),
    (answer({"content": "a"}, "stop", stop_reason="<|im_end|>"), ("end_turn", None), ("completed", None)),
    (answer({"content": "a"}, "length"), ("max_tokens", None), ("incomplete", "max_output_tokens")),
    (answer({"content": "a"}, "content_filter"), ("refusal", None), ("incomplete", "content_filter")),
    (answer({"content": None, "refusal": "no"}, "stop"), ("refusal", None), ("completed", None)),
    (answer({"content": None, "tool_calls": [CALL]}, "tool_calls"), ("tool_use", None), ("completed", None)),
    # Some servers say `stop` beside calls.
    (answer({"content": None, "tool_calls": [CALL]}, "stop"), ("tool_use", None), ("completed", None)),
    (
        answer({"content": None, "tool_calls": [CALL]}, "length"),
        ("max_tokens", None),
        ("incomplete", "max_output_tokens"),
    ),
]


@pytest.mark.parametrize(("said", "stop", "status"), ENDS)
def test_ends(said: Json, stop: tuple[str, str | None], status: tuple[str, str | None]) -> None:
    choice = said["choices"][0]
    delta = {name: value for name, value in choice["message"].items() if value is not None}
    chunk = {"choices": [{name: value for name, value in choice.items() if name != "message"} | {"delta": delta}]}

    body = {"model": "m", "stop_sequences": ["END"]}
    whole = messages.from_chat(said, body)
    assert (whole["stop_reason"], whole["stop_sequence"]) == stop
    assert anthropic_types.Message.model_validate(whole).model == "m"
    *_, last, _ = events(streamed(messages.encoder(body), [chunk]))
    assert last["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence", "stop_details")}

    whole = responses.from_chat(said, body)
    assert (whole["status"], (whole["incomplete_details"] or {}).get("reason")) == status
    assert whole["usage"] is None
    responses_types.Response.model_validate(whole)
    *_, last = events(streamed(responses.encoder(body), [chunk]))
    assert last["type"] == f"response.{status[0]}"
    assert [item["status"] for item in last["response"]["output"]] == [item["status"] for item in whole["output"]]


def test_a_refusal_keeps_its_words() -> None:
    said = answer({"role": "assistant", "content": None, "refusal": "I will not."}, "stop")
    whole = messages.from_chat(said, {})
    assert whole["content"] == [{"type": "text", "text": "I will not.", "citations": None}]
    assert whole["stop_details"] == {"type": "refusal", "category": None, "explanation": "I will not."}
    whole = responses.from_chat(said, {})
    assert whole["output"][0]["content"] == [{"type": "refusal", "refusal": "I will not."}]
    assert responses.answer_to_chat(whole)["choices"][0]["message"] == said["choices"][0]["message"]


def test_logprobs_come_with_the_text_when_they_are_asked_for() -> None:
    said = answer({"content": "ab"}, "stop", logprobs={"content": [logprob(1), {"token": "b", "logprob": -2}]})
    expected = [logprob(1), {"token": "b", "logprob": -2, "bytes": [], "top_logprobs": []}]
    chunks: list[Json] = [
        {"choices": [{"delta": {"content": word}, "logprobs": {"content": [token]}}]}
        for word, token in zip("ab", said["choices"][0]["logprobs"]["content"], strict=True)
    ]
    for body, held in (({"include": ["message.output_text.logprobs"]}, expected), ({}, [])):
        whole = responses.from_chat(said, body)
        assert whole["output"][0]["content"][0]["logprobs"] == held
        *_, last = events(streamed(responses.encoder(body), chunks))
        assert last["response"]["output"][0]["content"] == whole["output"][0]["content"]


def test_ids_are_the_servers_own_and_never_missing() -> None:
    said = {**answer({"content": "a"}, "stop"), "id": "chatcmpl-5f-3"}
    assert messages.from_chat(said, {})["id"] == "msg_5f3"
    whole = responses.from_chat(said, {})
    assert (whole["id"], whole["output"][0]["id"]) == ("resp_5f3", "msg_5f3_0")
    first, second = (messages.from_chat(answer({"content": "a"}, "stop"), {})["id"] for _ in range(2))
    assert first != second


@pytest.mark.parametrize("broken", [{}, {"choices": []}, {"choices": [{}]}, {"choices": "no"}, {"error": {}}])
def test_an_answer_that_is_none(broken: Json) -> None:
    for dialect in (messages, responses):
        with pytest.raises(BadAnswer, match="has no message in its first choice"):
            dialect.from_chat(broken, {})
        with pytest.raises(BadAnswer, match="the answer of the"):
            dialect.answer_to_chat(broken)
    if not broken.get("choices"):
        with pytest.raises(BadAnswer, match="no choices"):
            chat.from_chat(broken, {})


def test_what_anthropic_streams_natively_is_put_together() -> None:
    cited = {"type": "char_location", "cited_text": "x", "document_index": 0, "document_title": None,
             "start_char_index": 0, "end_char_index": 1, "file_id": None}  # fmt: skip
    search = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}}
    used = {"input_tokens": 3, "cache_read_input_tokens": 7, "cache_creation_input_tokens": 2, "output_tokens": 1}
    begun = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude", "content": [],
             "stop_reason": None, "stop_sequence": None, "usage": used}  # fmt: skip

    def block(index: int, start: Json, *deltas: Json) -> list[Json]:
        return [
            {"type": "content_block_start", "index": index, "content_block": start},
            *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
            {"type": "content_block_stop", "index": index},
        ]

    stream: list[Json] = [
        {"type": "message_start", "message": begun},
        {"type": "ping"},
        *block(0, {"type": "thinking", "thinking": "", "signature": ""},
               {"type": "thinking_delta", "thinking": "h"}, {"type": "thinking_delta", "thinking": "m"},
               {"type": "signature_delta", "signature": "sig"}),
        *block(1, search, {"type": "input_json_delta", "partial_json": '{"query": '},
               {"type": "input_json_delta", "partial_json": '"q"}'}),
        *block(2, {"type": "text", "text": "", "citations": []}, {"type": "text_delta", "text": "ok"},
               {"type": "citations_delta", "citation": cited}),
        {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None},
         "usage": {"output_tokens": 9, "input_tokens": None}},
        {"type": "message_stop"},
    ]  # fmt: skip
    listener = messages.listener({})
    for event in stream:
        assert listener.answer() is None
        listener.feed(event)
    heard = listener.answer()
    assert heard == {
        **begun,
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "sig"},
            {**search, "input": {"query": "q"}},
            {"type": "text", "text": "ok", "citations": [cited]},
        ],
        "stop_reason": "end_turn",
        "usage": {**used, "output_tokens": 9},
    }
    anthropic_types.Message.model_validate(heard)
    recorded = messages.answer_to_chat(heard)
    assert recorded["choices"][0]["message"] == {
        "role": "assistant",
        "content": "ok",
        "reasoning_content": "hm",
        "other": [{**search, "input": {"query": "q"}}],
    }
    assert (recorded["usage"]["prompt_tokens"], recorded["usage"]["prompt_tokens_details"]["cached_tokens"]) == (12, 7)
