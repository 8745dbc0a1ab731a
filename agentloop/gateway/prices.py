"""The cost of a call: the prices of `agentloop/costs/totals.py` for the usage that an upstream reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentloop.costs import totals as costs
from agentloop.types import Completion, Message

Price = Callable[[str, Mapping[str, Any]], float | None]
"""(model, usage as in chat completions) -> USD, or None if it is unknown."""


def unknown(model: str, usage: Mapping[str, Any]) -> float | None:
    """The price without a price list."""
    return None


def own_cost(model: str, usage: Mapping[str, Any]) -> float | None:
    """The cost that a policy of this process reports itself."""
    cost = usage.get("cost_usd")
    return cost if isinstance(cost, float) else None


def by_usage(price: costs.Price) -> Price:
    """`price` for calls of the gateway. The cost of a malformed usage is unknown."""

    def of(model: str, usage: Mapping[str, Any]) -> float | None:
        details = usage.get("prompt_tokens_details")
        counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
        cached = details.get("cached_tokens") if isinstance(details, dict) else 0
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            return None
        return price(
            Completion(
                message=Message(role="assistant"),
                finish_reason="stop",
                model=model,
                n_prompt_tokens=usage["prompt_tokens"],
                n_cached_tokens=cached if isinstance(cached, int) else 0,
                n_completion_tokens=usage["completion_tokens"],
            )
        )

    return of
