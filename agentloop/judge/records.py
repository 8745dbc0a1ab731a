"""Stored traces as the judge reads them, and the task that a trace without one is taken for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from agentloop.failures.critical import classify, label
from agentloop.failures.detectors.rules import Rule
from agentloop.failures.imported import read_imported
from agentloop.failures.taxonomy import VERSION
from agentloop.judge.transcript import task as instruction
from agentloop.otel.spans import trace_of
from agentloop.store.bodies import unpack
from agentloop.store.store import Store
from agentloop.types import Imported, RewardState, Score, Task, Trace, Verdict

MAX_SPANS = 50_000
"""Spans of a trace up to which it is read as steps; a run of 10,000 steps has some 20,000."""


class TraceRecord(NamedTuple):
    """A stored trace with what is known of its worth, and as it was imported if it was."""

    trace: Trace
    verdict: Verdict
    imported: Imported | None = None


def read(store: Store, row: Any) -> TraceRecord | None:
    """None for a trace of more spans than MAX_SPANS, or of none."""
    if is_ours(row):
        return TraceRecord(*unpack(row.body))
    verdict = Verdict(trace_id=row.id, state=RewardState(row.reward_state), reward=row.reward)
    if row.body is not None:
        imported = store.imported(row.project, row.id)
        return TraceRecord(imported.trace, verdict, imported)
    if 0 < row.n_spans <= MAX_SPANS:
        return TraceRecord(trace_of(store.spans(row.project, row.id, limit=MAX_SPANS).spans), verdict)
    return None


def is_ours(row: Any) -> bool:
    """Of an episode that was rolled out here: others' traces, too, may say to which episode they belong."""
    return row.stage is not None or row.superseded is not None


def bare_task(trace: Trace) -> Task:
    """What is known of the task of a trace that is in no suite here: what was asked."""
    return Task(id=trace.task_id or "unknown", instruction=instruction(trace))


def classified(
    task: Task,
    trace: Trace,
    state: RewardState,
    reward: float | None,
    scores: tuple[Score, ...] = (),
    *,
    guess: Rule | None = None,
    **more: Any,
) -> Verdict:
    """A verdict whose state and reward are settled, with the failures as they are found today. guess: of `classify`."""
    final = tuple(score for score in scores if not score.waiting)
    failures = classify(task, trace, state, reward, final, guess=guess)
    return Verdict(
        trace_id=trace.id, state=state, reward=reward, scores=scores, failures=failures, taxonomy=VERSION, **more
    )


def classified_imported(
    imported: Imported, state: RewardState, reward: float | None, *, guess: Rule | None = None
) -> Verdict:
    """The same of a trace from elsewhere, with all that its source said: what was expected, how it ended.

    A reward that is known makes it `scored`.
    """
    reading = read_imported(imported)
    if reading.reward != reward:
        reading = replace(reading, reward=reward)
    if reward is not None:
        state = RewardState.scored
    failures = label(reading, state, guess=guess)
    return Verdict(trace_id=imported.trace.id, state=state, reward=reward, failures=failures, taxonomy=VERSION)
