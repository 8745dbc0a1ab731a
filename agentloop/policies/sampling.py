"""Reads the sampling of an answer from the chat completions request that was sent.

The keys are those of OpenAI and of vLLM, which accepts more. An unknown key is assumed not to change the distribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentloop.types import Sampling

PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}
"""Key -> its neutral value. `min_tokens` suppresses the end mark for a while."""
BANS = ("logit_bias", "bad_words", "allowed_token_ids", "logits_processors", "thinking_token_budget", "use_beam_search")
"""Keys that make the sampler prefer, ban or force tokens."""
GRAMMARS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar")
"""Keys for a grammar on various servers, in addition to `response_format`."""


def sampling_of(request: Mapping[str, Any]) -> Sampling:
    """How an answer to `request` is sampled. A value of the wrong type counts as missing."""
    top_k = request.get("top_k")
    return Sampling(
        temperature=_number(request, "temperature", 1.0),
        top_p=_number(request, "top_p", 1.0),
        # Not `isinstance`: True is an int.
        top_k=top_k if type(top_k) is int else None,
        min_p=_number(request, "min_p", 0.0),
        is_penalised=_is_penalised(request),
        is_constrained=_is_constrained(request),
    )


def _is_penalised(request: Mapping[str, Any]) -> bool:
    if any(request.get(key) for key in BANS):
        return True
    return any(_number(request, key, neutral) != neutral for key, neutral in PENALTIES.items())


def _is_constrained(request: Mapping[str, Any]) -> bool:
    form = request.get("response_format")
    if isinstance(form, dict) and form.get("type") != "text":
        return True
    tool_choice = request.get("tool_choice")
    if isinstance(tool_choice, dict) or tool_choice in ("required", "any"):
        return True
    if any(request.get(key) for key in GRAMMARS):
        return True
    # Servers enforce the schema of a strict tool wherever the model begins a call, unless no tool may be called.
    return tool_choice != "none" and any(map(_is_strict, request.get("tools") or ()))


def _is_strict(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and bool(function.get("strict"))


def _number(request: Mapping[str, Any], key: str, default: float) -> float:
    value = request.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return default
