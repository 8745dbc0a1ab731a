"""What people say is wrong in stored traces: labels in a file or in the store, and the traces that they are about.

A line a trace: `{"trace": ID, "step": 3, "type": "obs.misread"}`. `step` is the critical one's index, `type` its
failure's, `others` further types of the run, `task` what keeps traces of one task together; all but `trace` may be
left out. Whether a run failed is what its verdict says; where that says nothing, a run with a critical step or a type
failed. Nothing here learns or measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import ConfigDict, ValidationError

from agentloop.errors import ConfigError
from agentloop.failures.analysis import measure
from agentloop.failures.evidence import quote_at
from agentloop.failures.learned.fitting import Labelled
from agentloop.input_files import place_of
from agentloop.judge.settle import check_name
from agentloop.judge.stored import MAX_SPANS, read
from agentloop.store.store import Store
from agentloop.store.verdicts import PERSON
from agentloop.types import Failure, FailureType, Frozen, Imported, Score


class Label(Frozen):
    """What somebody said of one trace."""

    model_config = ConfigDict(extra="forbid")

    trace: str
    step: int | None = None
    type: FailureType | None = None
    others: tuple[FailureType, ...] = ()
    task: str | None = None


class LabelledTrace(NamedTuple):
    """A labelled trace as each side wants it."""

    to_learn: Labelled
    to_measure: measure.Labelled


def read_labels(path: Path) -> list[Label]:
    """Raises ConfigError, with the line, for one that is no label and for a trace that is there twice; OSError."""
    labels: dict[str, Label] = {}
    for n, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            label = Label.model_validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = place_of(first["loc"]) or "the line"
            raise ConfigError(
                f"{path}:{n}: {where}: {first['msg']}; a label is such as "
                '{"trace": "ID", "step": 3, "type": "obs.misread"}'
            ) from None
        if label.trace in labels:
            raise ConfigError(f"{path}:{n}: trace {label.trace} has a label already; leave one of them out")
        labels[label.trace] = label
    if not labels:
        raise ConfigError(f"{path}: no labels in it; write one line a trace")
    return list(labels.values())


def stored_labels(store: Store, *, project: str) -> list[Label]:
    """What people said by `agentloop judge label`, the newest label of each trace."""
    return [
        Label(trace=trace_id, step=failure.step, type=_type(failure.type))
        for trace_id, failure in store.person_labels(project)
    ]


def put_label(
    store: Store, project: str, trace_id: str, kind: FailureType | None, step: int | None, *, by: str, note: str
) -> tuple[Failure, bool]:
    """A person's word on why a run failed: which type, at which step. It is critical unless the run succeeded.

    kind: None where only the step is known. Returns the label, and whether it says anything new.
    Raises NoSuchTrace; ConfigError for a name that is none, a step that the trace does not have, or neither given.
    """
    check_name(by)
    if kind is None and step is None:
        raise ConfigError("a label needs --type, --step or both")
    row = store.row(project, trace_id)
    stored = read(store, row)
    steps = [] if stored is None else [each.index for each in stored.trace.steps]
    if step is not None and step not in steps:
        has = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has no steps"
        raise ConfigError(f"--step {step}: trace {trace_id} has no such step; {has}")
    at, words = quote_at(stored.trace, step, "") if stored is not None else (step, "")
    failure = Failure(
        type=kind or FailureType.unclassified,
        step=step,
        evidence=words if at == step else "",  # a step without words is quoted by nothing
        detector=PERSON + by,
        critical=row.reward is None or row.reward < 1.0,
    )
    return failure, store.put_person_label(project, trace_id, failure, by=by, why=note)


def _type(kind: FailureType) -> FailureType | None:
    return None if kind is FailureType.unclassified else kind


def labelled(store: Store, labels: Sequence[Label], *, project: str) -> list[LabelledTrace]:
    """The stored traces that labels are about. Raises NoSuchTrace; ConfigError for a step that a trace has not."""
    rows = []
    for label in labels:
        stored = read(store, store.row(project, label.trace))
        if stored is None:
            raise ConfigError(
                f"trace {label.trace}: not between 1 and {MAX_SPANS} spans, so it cannot be read as steps"
            )
        trace, verdict = stored.trace, stored.verdict
        if label.step is not None and all(step.index != label.step for step in trace.steps):
            raise ConfigError(f"trace {label.trace}: no step {label.step}; see `agentloop traces show {label.trace}`")
        types = frozenset(kind for kind in (label.type, *label.others) if kind is not None)
        says_why = label.step is not None or bool(types)
        won = verdict.reward is not None and verdict.reward >= 1.0
        reward = 0.0 if verdict.reward is None and says_why else verdict.reward
        scores = () if reward is None else (Score(verifier=":reward", version="0", value=reward),)
        learn = Labelled(
            trace,
            label.task or trace.task_id or trace.id,
            step=None if won else label.step,  # nothing decided the failure of a success
            category=None if won else label.type,
            failed=None if reward is None else reward < 1.0,
        )
        rows.append(LabelledTrace(learn, measure.Labelled(Imported(trace=trace, scores=scores), types or None)))
    return rows
