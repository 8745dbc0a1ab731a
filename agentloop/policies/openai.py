"""Any endpoint that speaks the OpenAI chat completions dialect, over httpx: hosted models, vLLM, llama.cpp.

It keeps token ids and log-probabilities when the server gives them, which vLLM does when asked.
Retries are for what is safe to repeat: a request that got no answer, or a 429 or 5xx.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
from pydantic import SecretStr

from agentloop.errors import ConfigError, PolicyError
from agentloop.types import Completion, Message, ToolCall, ToolSpec

RETRIES = 3
TIMEOUT_S = 120.0


class OpenAIPolicy:
    """One model behind one base URL (which ends before `/chat/completions`)."""

    name = "openai"

    def __init__(
        self, base_url: str | None, model: str | None, *, api_key: SecretStr | None = None, temperature: float = 1.0
    ) -> None:
        if not base_url or not model:
            raise ConfigError("policy 'openai' needs base_url and model; set both under [policy] in agentloop.toml")
        self.model, self.temperature = model, temperature
        headers = {"Authorization": f"Bearer {api_key.get_secret_value()}"} if api_key else {}
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._headers = headers
        self._tls = httpx.create_ssl_context()  # reading the certificates anew for each call would cost 20 ms

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, max_tokens: int, seed: int
    ) -> Completion:
        """See `protocols.Policy`. Raises PolicyError with the endpoint's own words."""
        body = {
            "model": self.model,
            "messages": [_wire_message(message) for message in messages],
            "tools": [{"type": "function", "function": tool.model_dump()} for tool in tools],
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "seed": seed % 2**31,
        }
        response = await self._post(body)
        try:
            return _completion(response.json())
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise PolicyError(
                f"{self._url} answered with no chat completion ({error!r}): {response.text[:200]}"
            ) from error

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        problem = ""
        for attempt in range(RETRIES):
            if attempt:
                await asyncio.sleep(2.0**attempt / 2)
            try:
                async with httpx.AsyncClient(timeout=TIMEOUT_S, verify=self._tls) as client:
                    response = await client.post(self._url, json=body, headers=self._headers)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                if isinstance(error, httpx.ConnectError):
                    break  # nobody is there; a moment later nobody is, too
                continue
            if response.status_code < 400:
                return response
            problem = f"HTTP {response.status_code}: {response.text[:200]}"
            if response.status_code != 429 and response.status_code < 500:
                break
        raise PolicyError(f"{self._url}: {problem}")


def _wire_message(message: Message) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        wire["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.tool_calls
        ]
    if message.tool_call_id:
        wire["tool_call_id"] = message.tool_call_id
    return wire


def _completion(answer: dict[str, Any]) -> Completion:
    choice = answer["choices"][0]
    said = choice["message"]
    calls = tuple(
        ToolCall(
            id=call["id"],
            name=_text(call["function"]["name"]),
            arguments=_text(call["function"]["arguments"] or "{}"),
        )
        for call in said.get("tool_calls") or ()
    )
    ids = tuple(choice.get("token_ids") or ())
    logprobs = tuple(item["logprob"] for item in ((choice.get("logprobs") or {}).get("content") or ()))
    usage = answer.get("usage") or {}
    return Completion(
        message=Message(role="assistant", content=_text(said.get("content") or ""), tool_calls=calls, token_ids=ids),
        finish_reason=choice.get("finish_reason") or "stop",
        prompt_token_ids=tuple(answer.get("prompt_token_ids") or ()),
        logprobs=logprobs if len(logprobs) == len(ids) else (),
        n_prompt_tokens=usage.get("prompt_tokens", 0),
        n_completion_tokens=usage.get("completion_tokens", 0),
    )


def _text(said: str) -> str:
    """`said` as it can be stored: half of a surrogate pair, which only JSON can hold, becomes a question mark."""
    return said.encode(errors="replace").decode()
