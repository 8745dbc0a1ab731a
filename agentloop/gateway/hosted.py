"""An upstream that is a library: litellm, which knows the providers whose dialects nobody here speaks.

It gives what a server of chat completions would send, as bytes, so that the rest of the gateway does not know it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import orjson

from agentloop.errors import PluginError
from agentloop.gateway.failures import Refusal, UpstreamFailed
from agentloop.gateway.routes import Upstream
from agentloop.policies.litellm import load_litellm

TOO_LONG = "context_length_exceeded"
PASSED_ON = frozenset(
    {
        "frequency_penalty", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens", "messages", "modalities",
        "model", "n", "parallel_tool_calls", "presence_penalty", "reasoning_effort", "response_format", "seed",
        "service_tier", "stop", "stream", "stream_options", "temperature", "tool_choice", "tools", "top_logprobs",
        "top_p", "user", "verbosity",
    }
)  # fmt: skip
"""Fields of a request that are the client's to set. Any other may tell litellm where to send the key, or a file."""


class HostedAnswer:
    """See `upstreams.Answer`."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def aclose(self) -> None:
        """End the connection, if there is one."""
        close = getattr(self._answer, "aclose", None)  # of a stream
        if close is not None:
            with suppress(Exception):  # the classes of every provider's client
                await close()

    async def whole(self) -> bytes:
        """The answer, as JSON."""
        return orjson.dumps(self._answer.model_dump())

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Each chunk as an event."""
        with_errors = aiter(self._answer)
        while True:
            try:
                chunk = await anext(with_errors)
            except StopAsyncIteration:
                break
            except Exception as error:  # the classes of every provider's client
                raise UpstreamFailed("broken_off", f"broke off ({type(error).__name__}: {error})") from error
            yield b"data: %b\n\n" % orjson.dumps(chunk.model_dump(exclude_none=True))
        yield b"data: [DONE]\n\n"


async def ask(upstream: Upstream, body: bytes) -> HostedAnswer:
    """Ask the provider. Raises Refusal and UpstreamFailed."""
    asked = orjson.loads(body)
    if others := sorted(asked.keys() - PASSED_ON):
        raise Refusal(400, _error(f"{', '.join(others)}: no field that is passed on to this model", None), None)
    try:
        litellm = load_litellm()
    except PluginError as error:
        raise UpstreamFailed("unreachable", f"cannot be asked ({error})") from error
    given = {
        **({"api_key": upstream.api_key} if upstream.api_key else {}),
        **({"api_base": upstream.base_url} if upstream.base_url else {}),
    }
    try:
        # As in policies/litellm.py: nothing is tried again, nothing that its proxy alone has is imported.
        answer = await litellm.acompletion(
            **asked,
            **given,
            drop_params=True,
            num_retries=0,
            max_retries=0,
            timeout=upstream.timeout_s,
            _skip_mcp_handler=True,
        )
    except litellm.ContextWindowExceededError as error:
        raise Refusal(400, _error(str(error), TOO_LONG), None) from error
    except Exception as error:  # the classes of every provider's client
        status = getattr(error, "status_code", None)
        words = f"{type(error).__name__}: {error}"
        if isinstance(error, litellm.Timeout):
            raise UpstreamFailed("silent", f"said nothing for too long ({words})", 504) from error
        if not isinstance(status, int) or status >= 500:
            raise UpstreamFailed("unreachable", f"gave no answer ({words})") from error
        raise Refusal(status, _error(words, None), None) from error
    return HostedAnswer(answer)


def _error(message: str, code: str | None) -> bytes:
    return orjson.dumps({"error": {"message": message, "code": code}})
