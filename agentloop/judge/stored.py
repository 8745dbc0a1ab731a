"""Stored traces as the judge reads them, and the task that a trace without one is taken for."""

from __future__ import annotations

from typing import Any

from agentloop.formats.spans import trace_of
from agentloop.judge.failures.critical import classify
from agentloop.judge.failures.taxonomy import VERSION
from agentloop.judge.transcript import task as instruction
from agentloop.store.bodies import unpack
from agentloop.store.store import Store
from agentloop.types import RewardState, Score, Task, Trace, Verdict

MAX_SPANS = 2000
"""Spans of a trace up to which it is read as steps."""


def read(store: Store, row: Any) -> tuple[Trace, Verdict] | None:
    """A trace with what is known of its worth; None for one of more spans than MAX_SPANS, or of none."""
    if row.episode_id is not None:
        return unpack(row.body)
    if row.body is not None:
        trace = store.imported(row.project, row.id).trace
    elif 0 < row.n_spans <= MAX_SPANS:
        trace = trace_of(store.spans(row.project, row.id, limit=MAX_SPANS).spans)
    else:
        return None
    return trace, Verdict(trace_id=row.id, state=RewardState(row.reward_state), reward=row.reward)


def bare_task(trace: Trace) -> Task:
    """What is known of the task of a trace that is in no suite here: what was asked."""
    return Task(id=trace.task_id or "unknown", instruction=instruction(trace))


def classified(
    task: Task, trace: Trace, state: RewardState, reward: float | None, scores: tuple[Score, ...] = (), **more: Any
) -> Verdict:
    """A verdict whose state and reward are settled, with the failures as they are found today."""
    failures = classify(task, trace, state, reward, tuple(score for score in scores if not score.waiting))
    return Verdict(
        trace_id=trace.id, state=state, reward=reward, scores=scores, failures=failures, taxonomy=VERSION, **more
    )
