"""Anthropic's client on a model that vLLM serves: every token of its trace is what vLLM itself returned."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anthropic
import pytest

from agentloop.gateway.routes import Upstream
from benchmarks.fidelity import SHELL, Tap
from tests.api import asked
from tests.gateway.serving import gateway_here

from . import tiny_model
from .conftest import Running

pytestmark = pytest.mark.slow

Ask = Callable[[str, dict[str, Any]], Awaitable[Any]]
TOOL = {"name": SHELL.name, "description": SHELL.description, "input_schema": SHELL.parameters}
GIVEN: dict[str, Any] = {"model": tiny_model.NAME, "max_tokens": 60, "tools": [TOOL], "extra_body": {"temperature": 0}}
RESULTS = ("f07 42", "42", "no more")
"""Of the calls of each turn, if it makes any: the model is a small one."""


async def whole(url: str, given: dict[str, Any]) -> Any:
    def ask() -> Any:
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
            return client.messages.create(**given)

    return await asyncio.to_thread(ask)


async def streamed(url: str, given: dict[str, Any]) -> Any:
    def ask() -> Any:
        with (
            anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
            client.messages.stream(**given) as stream,
        ):
            return stream.get_final_message()

    return await asyncio.to_thread(ask)


async def whole_async(url: str, given: dict[str, Any]) -> Any:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        return await client.messages.create(**given)


async def streamed_async(url: str, given: dict[str, Any]) -> Any:
    async with (
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
        client.messages.stream(**given) as stream,
    ):
        return await stream.get_final_message()


async def count(url: str, given: dict[str, Any]) -> int:
    asked = {name: value for name, value in given.items() if name not in ("max_tokens", "extra_body")}
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        return (await client.messages.count_tokens(**asked)).input_tokens


@pytest.mark.parametrize("ask", [whole, streamed, whole_async, streamed_async])
def test_a_conversation_with_calls_has_every_token(vllm: Running, ask: Ask, tmp_path: Path) -> None:
    async def conversation() -> None:
        tap = Tap(vllm.url.removesuffix("/v1"))
        async with AsyncExitStack() as stack:
            upstream = Upstream("vllm", f"{await stack.enter_async_context(tap.listening(0))}/v1")
            gateway = stack.enter_context(gateway_here(tmp_path / "store.db", upstream))
            url, told, counted, called = f"{gateway.url}/e/run-1", [], [], []
            messages: list[dict[str, Any]] = [{"role": "user", "content": "what is in f07?"}]
            for result in RESULTS:
                given = {**GIVEN, "messages": messages}
                counted.append(await count(url, given))
                told.append(asked.asked({"messages": list(messages)}))
                said = await ask(url, given)
                blocks = [block.model_dump(include={"type", "text", "id", "name", "input"}) for block in said.content]
                calls = [block for block in blocks if block["type"] == "tool_use"]
                called.append([(call["id"], call["name"], call["input"]) for call in calls])
                answers = [{"type": "tool_result", "tool_use_id": call["id"], "content": result} for call in calls]
                more = {"role": "user", "content": answers or "go on"}
                messages += [{"role": "assistant", "content": blocks}, more]
            ((_, name, given),) = called[0]
            assert (name, [*given]) == (SHELL.name, ["command"])
            (document,) = await asyncio.to_thread(gateway.traces)
            trace = document["trace"]
            assert trace["episode_id"] == "run-1"
            assert len(trace["steps"]) == len(told)
            for n, (step, returned) in enumerate(zip(trace["steps"], tap.returned.values(), strict=True)):
                assert asked.told(trace, n) == told[n]
                done = step["completion"]
                assert tuple(done["prompt_token_ids"]) == returned.prompt
                assert tuple(done["message"]["token_ids"]) == returned.sampled
                assert tuple(done["logprobs"]) == returned.logprobs
                assert len(returned.logprobs) == len(returned.sampled) > 1
                assert counted[n] == len(returned.prompt) == done["n_prompt_tokens"]
            made = [step["completion"]["message"]["tool_calls"] for step in trace["steps"]]
            assert [[(c["id"], c["name"], json.loads(c["arguments"])) for c in calls] for calls in made] == called
            assert trace["steps"][0]["results"][0]["content"] == RESULTS[0]

    asyncio.run(conversation())
