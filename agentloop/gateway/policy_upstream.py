"""An upstream that is a policy of this process: scripted, tiny, replayed, or anybody's own.

It gives what a server of chat completions would send, as bytes; streamed, that is all in one chunk.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import orjson

from agentloop.errors import AgentLoopError, MalformedAnswer, ModelRefused, UpstreamUnavailable, boundary
from agentloop.gateway.failures import Refusal, UpstreamFailed
from agentloop.gateway.routes import Upstream
from agentloop.otel.messages import messages_of
from agentloop.policies.openai import wire
from agentloop.types import Completion, ToolSpec

MAX_TOKENS = 4096
"""Of an answer to a request that does not say."""
TOO_LONG = (
    b'{"error": {"message": "the conversation is longer than the maximum context length of the model", '
    b'"code": "context_length_exceeded"}}'
)
"""In words by which clients know it."""


class PolicyAnswer:
    """See `upstreams.Answer`."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._answer = answer

    async def whole(self) -> bytes:
        """The answer, as JSON."""
        return orjson.dumps(self._answer)

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Its one chunk."""
        (choice,) = self._answer["choices"]
        message = choice["message"]
        calls = [{"index": n, **call} for n, call in enumerate(message.get("tool_calls") or ())]
        delta = {**message, **({"tool_calls": calls} if calls else {})}
        told = {key: value for key, value in choice.items() if key != "message"}
        chunk = {**self._answer, "object": "chat.completion.chunk", "choices": [{**told, "delta": delta}]}
        yield b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps(chunk)


async def ask(upstream: Upstream, body: bytes) -> PolicyAnswer:
    """Ask the policy. Raises Refusal where it refuses, and UpstreamFailed.

    The kind of failure is `unreachable` only for a policy that says so; anything else that it raises is `no_answer`.
    """
    asked, policy = orjson.loads(body), upstream.policy
    assert policy is not None, "an upstream via `policy` has one"  # noqa: S101
    messages = messages_of(asked["messages"], "user")
    try:
        tools = _tools(asked.get("tools") or ())
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise Refusal(400, orjson.dumps({"error": {"message": f"tools: {error!r}"}}), None) from None
    max_tokens, seed = asked.get("max_completion_tokens") or asked.get("max_tokens"), asked.get("seed")
    try:
        with boundary(MalformedAnswer, f"policy {policy.name}"):
            completion = await policy.complete(
                messages,
                tools,
                max_tokens=max_tokens if isinstance(max_tokens, int) else MAX_TOKENS,
                seed=seed if isinstance(seed, int) else 0,
            )
    except UpstreamUnavailable as error:
        raise UpstreamFailed("unreachable", str(error)) from error
    except ModelRefused as error:
        raise Refusal(error.status or 400, orjson.dumps({"error": {"message": str(error)}}), None) from error
    except AgentLoopError as error:
        raise UpstreamFailed("no_answer", str(error)) from error
    if completion.finish_reason == "context":
        raise Refusal(400, TOO_LONG, None)
    return PolicyAnswer(_answer(completion, policy.name))


def _tools(given: Sequence[dict[str, Any]]) -> list[ToolSpec]:
    functions = [tool["function"] for tool in given if isinstance(tool.get("function"), dict)]
    return [
        ToolSpec(name=f["name"], description=f.get("description") or "", parameters=f.get("parameters") or {})
        for f in functions
    ]


def _answer(completion: Completion, model: str) -> dict[str, Any]:
    """As vLLM answers one that asks for log-probabilities and token ids."""
    said = completion.message
    (message,) = wire([said])
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    called = bool(message.get("tool_calls")) and completion.finish_reason == "stop"
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls" if called else completion.finish_reason,
        "logprobs": None,
    }
    made: dict[str, Any] = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": completion.model or model,
        "choices": [choice],
    }
    if completion.prompt_token_ids:
        made["prompt_token_ids"] = list(completion.prompt_token_ids)
    if said.token_ids:
        choice["token_ids"] = list(said.token_ids)
    if completion.logprobs:
        choice["logprobs"] = {"content": [_logprob(p) for p in completion.logprobs]}
    n_prompt = completion.n_prompt_tokens or len(completion.prompt_token_ids)
    n_completion = completion.n_completion_tokens or len(said.token_ids)
    made["usage"] = {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
        "prompt_tokens_details": {"cached_tokens": completion.n_cached_tokens},
        "cost_usd": completion.cost_usd,
    }
    return made


def _logprob(value: float) -> dict[str, Any]:
    """The token's text nobody knows here; its id is beside it."""
    return {"token": "", "logprob": value, "bytes": None, "top_logprobs": []}
