"""The overlay of a version, put into a request on its way to the upstream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentloop.gateway.contexts import AgentRun
from agentloop.gateway.dialects.dialect import Dialect, Overlaid
from agentloop.gateway.dialects.overlaid import first_words
from agentloop.gateway.routes import Target


def overlaid(
    dialect: Dialect, body: dict[str, Any], messages: Sequence[Any], target: Target, run: AgentRun | None = None
) -> Overlaid:
    """The request with the overlay of the version that answers it; unchanged without one.

    messages: of the request as chat completions. run: keeps the lessons that its first call chose.
    """
    if target.rewriting is None:
        return Overlaid(body, ())
    lessons = run.lessons.get(target.version) if run else None
    if lessons is None:
        lessons = target.rewriting.lessons(first_words(messages))
    if run is not None:
        run.lessons[target.version] = lessons
    return dialect.overlaid(body, target.rewriting, lessons)
