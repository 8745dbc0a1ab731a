"""A span: one row of a trace in OpenTelemetry form."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """One OpenTelemetry span as it is stored. A plain tuple, because thousands arrive in a second."""

    trace_id: str
    """32 hex digits."""
    span_id: str
    """16 hex digits, unique in its trace."""
    parent_id: str | None
    name: str
    kind: str
    """chat, tool, agent, or other: what its attributes say it did; event for a log record, which has a row, too."""
    start_ns: int
    """Since 1970; 0 where it is unknown."""
    end_ns: int
    error: str | None
    """Why it failed, `error` when nothing more was said; None for one that did not."""
    session: str | None
    agent: str | None
    model: str | None
    tool: str | None
    n_prompt_tokens: int
    n_completion_tokens: int
    cost_usd: float | None
    head: bytes
    """JSON: {"attributes", "events", "links", "resource", "scope", ...} as they came, where `{"$": n}` stands for
    the n-th of `bodies`."""
    bodies: tuple[bytes, ...]
    """JSON of each message, tool argument and result: what repeats from span to span and is searched."""
    episode_id: str | None = None
    """Run that the span names as its own, as do the next two fields."""
    task_id: str | None = None
    policy_version: int | None = None
    reward: float | None = None
    """Reward that the span reports for its run, in [0, 1]."""
    response_id: str | None = None
    """The model's, by which two libraries' spans of one call are known to be of one."""
