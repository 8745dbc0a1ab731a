"""Chat completions as hypothesis draws them, and the same answers cut into the chunks of a stream."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import orjson
from hypothesis import strategies as st

from agentloop.gateway.dialects.sse import Events

Json = dict[str, Any]

WORDS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(WORDS, VALUES, max_size=3).map(lambda given: json.dumps(given, ensure_ascii=False))
USAGES = st.builds(
    lambda cached, fresh, thought, said: {
        "prompt_tokens": cached + fresh,
        "completion_tokens": thought + said,
        "total_tokens": cached + fresh + thought + said,
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": thought},
    },
    *[st.integers(0, 10**6)] * 4,
)


@st.composite
def answers(draw: st.DrawFn, arguments: st.SearchStrategy[str] = ARGUMENTS) -> Json:
    message: Json = {"role": "assistant", "content": draw(WORDS | st.just(""))}
    if draw(st.booleans()):
        message["reasoning_content"] = draw(WORDS)
    n_calls = draw(st.integers(0, 3))
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": f"tool_{n}", "arguments": draw(arguments)}}
        for n in range(n_calls)
    ]
    if calls:
        message |= {"tool_calls": calls, "content": message["content"] or None}
    n_tokens = draw(st.integers(0, 5))
    return {
        "id": "chatcmpl-7f3a",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "policy-7",
        "prompt_token_ids": [5, 6, 7],
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": draw(st.sampled_from(["tool_calls", "length"] if calls else ["stop", "length"])),
                "logprobs": {"content": [logprob(n) for n in range(n_tokens)]} if n_tokens else None,
                **({"token_ids": list(range(n_tokens))} if n_tokens else {}),
            }
        ],
        "usage": draw(USAGES),
    }


def logprob(n: int) -> Json:
    return {"token": f"t{n}", "bytes": [116], "logprob": -n / 8, "top_logprobs": []}


@st.composite
def cut(draw: st.DrawFn, answer: Json) -> list[Json]:
    """The answer's chunks: thought, then said, then the calls, whose pieces come mixed."""
    choice = answer["choices"][0]
    message = choice["message"]
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning_content", "content"):
        deltas += [{name: piece} for piece in pieces(draw, message.get(name) or "")]
    waiting = []
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        first = {"index": index, "id": call["id"], "type": "function", "function": {"name": function["name"]}}
        rest = [{"index": index, "function": {"arguments": piece}} for piece in pieces(draw, function["arguments"])]
        deltas.append({"tool_calls": [first]})
        waiting.append(rest)
    while any(waiting):
        queue = draw(st.sampled_from([queue for queue in waiting if queue]))
        deltas.append({"tool_calls": [queue.pop(0)]})
    for _ in range(draw(st.integers(0, 2))):
        deltas.insert(draw(st.integers(1, len(deltas))), {})
    base = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks: list[Json] = [{**base, "choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas]
    chunks[0]["prompt_token_ids"] = answer["prompt_token_ids"]
    for token, given in zip(choice.get("token_ids") or (), (choice["logprobs"] or {}).get("content", ()), strict=True):
        # In order, anywhere: vLLM keeps tokens of a call back until its parser knows, and sends them on empty deltas.
        at = chunks[token * len(chunks) // 5]["choices"][0]
        at["token_ids"] = [*at.get("token_ids", ()), token]
        at["logprobs"] = {"content": [*at.get("logprobs", {}).get("content", ()), given]}
    last = chunks[-1]["choices"][0]
    if draw(st.booleans()):
        chunks.append({**base, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    else:
        last["finish_reason"] = choice["finish_reason"]
    chunks.append({**base, "choices": [], "usage": answer["usage"]})
    return chunks


def pieces(draw: st.DrawFn, text: str) -> list[str]:
    ends = sorted({0, len(text), *draw(st.lists(st.integers(0, len(text)), max_size=4))})
    return [text[a:b] for a, b in pairwise(ends)]


def events(stream: bytes) -> list[Json]:
    return [orjson.loads(event.data) for event in Events().feed(stream) if event.data != b"[DONE]"]


def streamed(encoder: Any, chunks: list[Json]) -> bytes:
    made: bytes = b"".join(encoder.feed(chunk) for chunk in chunks)
    return made + encoder.end()
