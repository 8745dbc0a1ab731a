"""Any endpoint that speaks the OpenAI chat completions dialect, over httpx: hosted models, vLLM, llama.cpp.

It keeps token ids and log-probabilities when the server gives them, which vLLM does when asked.
Retries are for what is safe to repeat: a request that got no answer, or a 429 or 5xx. What the model
wrote is never the endpoint's fault: a call that cannot be read goes back to it as text, and a
conversation that no longer fits ends with `context`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from pydantic import SecretStr

from agentloop.errors import ConfigError, PolicyError
from agentloop.types import Completion, Message, ToolCall, ToolSpec

RETRIES = 3
TIMEOUT_S = 120.0
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What strict endpoints take for the name of a function."""
TOO_LONG = ("context_length_exceeded", "maximum context length", "maximum model length", "exceed_context_size")
"""In a 400 that says that the conversation does not fit: OpenAI's code, vLLM's words old and new, llama.cpp's type."""


class OpenAIPolicy:
    """One model behind one base URL (which ends before `/chat/completions`)."""

    name = "openai"

    def __init__(
        self,
        base_url: str | None,
        model: str | None,
        *,
        api_key: SecretStr | None = None,
        temperature: float = 1.0,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """extra: further keys of every request, such as `response_format`."""
        if not base_url or not model:
            raise ConfigError("policy 'openai' needs base_url and model; set both under [policy] in agentloop.toml")
        self.model, self.temperature, self._extra = model, temperature, dict(extra or {})
        headers = {"Authorization": f"Bearer {api_key.get_secret_value()}"} if api_key else {}
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._headers = headers
        self._tls = httpx.create_ssl_context()  # reading the certificates anew for each call would cost 20 ms

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, max_tokens: int, seed: int
    ) -> Completion:
        """See `protocols.Policy`. Raises PolicyError with the endpoint's own words.

        Finishes with `context`, saying nothing, when the endpoint has no room for the conversation.
        """
        body = {
            "model": self.model,
            "messages": _wire(messages),
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "seed": seed % 2**31,
            **self._extra,
        }
        if tools:  # of none, strict endpoints take no empty list
            body["tools"] = [{"type": "function", "function": tool.model_dump()} for tool in tools]
        response = await self._post(body)
        if _is_too_long(response):
            return Completion(message=Message(role="assistant"), finish_reason="context")
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
            if response.status_code < 400 or _is_too_long(response):
                return response
            problem = f"HTTP {response.status_code}: {response.text[:200]}"
            if response.status_code != 429 and response.status_code < 500:
                break
        raise PolicyError(f"{self._url}: {problem}")


def _is_too_long(response: httpx.Response) -> bool:
    return response.status_code == 400 and any(words in response.text.lower() for words in TOO_LONG)


def _wire(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The conversation as a strict server takes it, in which every tool message answers a call that is there.

    A call that cannot be read is sent as text and its answer as the user's, behind the answers to the others.
    """
    sent: list[dict[str, Any]] = []
    unreadable: set[str] = set()
    waiting: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "tool" and message.tool_call_id in unreadable:
            waiting.append({"role": "user", "content": message.content})
            continue
        if message.role != "tool":
            sent += waiting
            waiting = []
            unreadable = {call.id for call in message.tool_calls if not _is_readable(call)}
        sent.append(_wire_message(message))
    return sent + waiting


def _wire_message(message: Message) -> dict[str, Any]:
    calls = [call for call in message.tool_calls if _is_readable(call)]
    texts = [f"{call.name} {call.arguments}" for call in message.tool_calls if not _is_readable(call)]
    content = "\n".join([message.content, *texts] if message.content else texts)
    wire: dict[str, Any] = {"role": message.role, "content": content}
    if calls:
        wire["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
        ]
    if message.tool_call_id:
        wire["tool_call_id"] = message.tool_call_id
    return wire


def _is_readable(call: ToolCall) -> bool:
    """Whether any JSON reader takes the arguments for an object, and strict endpoints the name."""
    try:
        arguments = json.loads(call.arguments)
        # NaN and half a surrogate pair are read by Python, and not by others.
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return isinstance(arguments, dict) and TOOL_NAME.fullmatch(call.name) is not None


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
