"""Costs of stored traces: tokens, money, and their share of a stage's energy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentloop.costs.totals import EpisodeCost, is_paid, judging_cost, shares, spent
from agentloop.otel.stored_trace import read_each
from agentloop.progress import Progress
from agentloop.store.store import Store
from agentloop.store.usage import TraceUsage
from agentloop.types import Completion, Message

LONG = 2000
"""Number of traces from which reading them takes seconds, so that progress is shown."""
_UNREAD = Message(role="assistant", content="")
"""In the place of each answer's message, which costs do not need."""
_COUNTED = ("model", "finish_reason", "n_prompt_tokens", "n_cached_tokens", "n_completion_tokens", "cost_usd")


def stored_costs(store: Store, filter: str, project: str | None, progress: Progress) -> Iterator[EpisodeCost]:
    """The costs of each trace that matches `filter`, with its share of its stage's energy by time."""
    stages = store.stages()
    times = store.stage_times(store.project)
    n_traces = store.n_found(filter, project=project)
    if n_traces >= LONG:
        progress.start("traces", n_traces)
    for page in store.usage(filter, project=project):
        for usage in page:
            row = usage.row
            energy: Mapping[str, float] = {}
            if row.stage in stages and row.project == store.project:  # `stages` are those of this project
                n, all_s = times[row.stage]
                energy = shares(stages[row.stage].metrics, n, row.duration_s, all_s)
            yield from _costs(store, usage, energy)
        if n_traces >= LONG:
            progress.advance(len(page))


def _costs(store: Store, usage: TraceUsage, energy: Mapping[str, float]) -> Iterator[EpisodeCost]:
    """The costs of one trace; none if it was removed meanwhile."""
    if usage.document is None:
        # A trace of spans has no stored document; its answers are found by rebuilding its steps.
        for stored in read_each(store, store.summaries_of([usage.row.key])):
            yield spent(stored.trace, stored.verdict, energy)
        return
    yield EpisodeCost(
        version=usage.document.get("policy_version"),
        task=usage.document.get("task_id"),
        is_solved=usage.row.reward == 1.0,
        answers=tuple(_answers(usage.document)),
        judging_usd=judging_cost(usage.scores),
        gpu_s=energy.get("gpu_s"),
        joules=energy.get("joules"),
        episode=usage.document.get("episode_id"),
    )


def _answers(trace: Mapping[str, Any]) -> Iterator[Completion]:
    """Like `completions`, from a stored document, whose fields the store has checked."""
    for step in trace["steps"]:
        fields = {name: step["completion"][name] for name in _COUNTED if name in step["completion"]}
        completion = Completion.model_construct(message=_UNREAD, **fields)
        if is_paid(completion, copied=step.get("copied", False)):
            yield completion
    for child in trace.get("children", ()):
        yield from _answers(child["trace"])
