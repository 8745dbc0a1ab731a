"""What a trace has no place for, and what several formats say in the same way."""

from __future__ import annotations

from typing import Any

from agentloop.formats.fields import Fields
from agentloop.formats.steps import Steps
from agentloop.types import Score

MAX_AGENTS = 32
"""Sub-agents of sub-agents that are followed; what is deeper, or starts itself, stands beside the first ones."""


def unheard(steps: Steps) -> dict[str, Any]:
    """For `Imported.raw`: what was said after the last answer, which no step heard."""
    said = [message.model_dump(mode="json", exclude_defaults=True) for message in steps.unheard]
    return {"unheard": said} if said else {}


def score(fields: Fields, key: str, verifier: str) -> list[Score]:
    """The number at `key` as a score; nothing, and the value stays, when it is none or not in [0, 1]."""
    value = fields.peek(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        return []
    fields.take(key)
    return [Score(verifier=verifier, version="1", value=float(value))]
