"""Scores, labels and rewards of traces: with the trace, or attached later by its id. The same again changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlmodel import SQLModel, col

from agentloop.errors import NoSuchTrace
from agentloop.store.statements import chunks
from agentloop.store.tables import LabelRow, ScoreRow, TraceRow, columns
from agentloop.types import Failure, RewardState, Score

JUDGE = "judge"
"""The source of scores that came with a verdict of ours."""
IMPORT = "import"
"""The source of those that came with a trace from elsewhere."""
API = "api"
"""The source of those that a client of the service gave without a name."""
PROGRAMS = frozenset({JUDGE, IMPORT, API})
"""Who gave a verdict when it was no person."""
LABELLED = "label:"
"""How `by` begins in a row of the history that a person's label added; the name follows."""
PERSON = "human:"
"""How the detector of a person's label begins; the name follows."""

REWARDS = ("reward", "resolved", "is_correct")
"""Names, after the source's own, of the imported score that says whether a run succeeded; the first one counts."""


def begins(column: Any, prefix: str) -> ColumnElement[bool]:
    """Whether a text begins with `prefix`, in the same case: LIKE ignores the case on SQLite."""
    same: ColumnElement[bool] = func.substr(column, 1, len(prefix)) == prefix
    return same


def reward_of(scores: Iterable[Score]) -> float | None:
    """What the source of a trace says it was worth, in [0, 1]; None where it does not say."""
    values = {score.verifier.partition(":")[2]: score.value for score in scores}
    return next((value for name in REWARDS if (value := values.get(name)) is not None), None)


def trace_key(connection: Connection, project: str, trace_id: str) -> int:
    """Raises NoSuchTrace."""
    query = select(col(TraceRow.key)).where(col(TraceRow.project) == project, col(TraceRow.id) == trace_id)
    key = connection.execute(query).scalar()
    if key is None:
        raise NoSuchTrace(f"no trace {trace_id!r} in project {project!r}; send the trace first")
    return key


def put_scores(connection: Connection, scores_by_trace: Iterable[tuple[int, Iterable[Score]]], source: str) -> None:
    """Insert scores of traces, by key, or replace what the same source said of the same verifier.

    source: of those that name none.
    """
    now = datetime.now(UTC)
    rows = [
        {
            "trace_key": key,
            "source": storable(score.source or source),
            "verifier": storable(score.verifier),
            "version": storable(score.version),
            "value": score.value,
            "error": score.error and storable(score.error),
            "given_at": now,
        }
        for key, scores in scores_by_trace
        for score in scores
    ]
    _upsert(connection, ScoreRow, rows)


def put_labels(
    connection: Connection, failures_by_trace: Iterable[tuple[int, Iterable[Failure]]], *, keep: Collection[int] = ()
) -> None:
    """Insert failures of traces, by key, or replace what the same detector said of the same type and step.

    A critical one becomes the trace's, and is the only one; not in those of `keep`, which have theirs. A success has
    no failure, whichever label is critical: the mark counts only while the reward is below 1 or unknown. A program's
    label never takes the mark from a person's.
    """
    now = datetime.now(UTC)
    rows = []
    critical = set()
    keys = set()
    labels = [(key, tuple(failures)) for key, failures in failures_by_trace]
    persons = _decided_by_persons(connection, [key for key, failures in labels if any(f.critical for f in failures)])
    for key, failures in labels:
        for failure in failures:
            is_critical = failure.critical and key not in keep and key not in critical
            is_critical = is_critical and (key not in persons or failure.detector.startswith(PERSON))
            rows.append(
                {
                    "trace_key": key,
                    "detector": storable(failure.detector),
                    "type": failure.type.value,
                    "step": -1 if failure.step is None else failure.step,
                    "evidence": storable(failure.evidence),
                    "confidence": failure.confidence,
                    "critical": is_critical,
                    "given_at": now,
                }
            )
            keys.add((key,))
            if is_critical:
                critical.add(key)
    mark = "?" if connection.dialect.name == "sqlite" else "%s"
    if critical:
        no = "0" if connection.dialect.name == "sqlite" else "FALSE"
        others = f"UPDATE label SET critical = {no} WHERE trace_key = {mark}"  # noqa: S608
        connection.exec_driver_sql(others, [(key,) for key in critical])
    _upsert(connection, LabelRow, rows)
    if keys:
        of_label = "SELECT type FROM label WHERE trace_key = trace.key AND critical ORDER BY step LIMIT 1"
        of_trace = f"CASE WHEN reward >= 1 THEN NULL ELSE ({of_label}) END"
        connection.exec_driver_sql(f"UPDATE trace SET failure = {of_trace} WHERE key = {mark}", list(keys))  # noqa: S608


def _decided_by_persons(connection: Connection, keys: Sequence[int]) -> set[int]:
    """The traces whose critical label is a person's."""
    persons: set[int] = set()
    for part in chunks(keys):
        query = select(col(LabelRow.trace_key)).where(
            col(LabelRow.trace_key).in_(part), col(LabelRow.critical), begins(col(LabelRow.detector), PERSON)
        )
        persons.update(connection.execute(query).scalars())
    return persons


def is_first(connection: Connection, key: int, failure: Failure) -> bool:
    """Whether a trace did not succeed, and nothing else than `failure` was critical in it."""
    critical = select(*columns(LabelRow)).where(col(LabelRow.trace_key) == key, col(LabelRow.critical))
    name = (storable(failure.detector), failure.type.value, -1 if failure.step is None else failure.step)
    others = [row for row in connection.execute(critical) if (row.detector, row.type, row.step) != name]
    reward = connection.execute(select(col(TraceRow.reward)).where(col(TraceRow.key) == key)).scalar_one()
    return not others and (reward is None or reward < 1.0)


def put_reward(connection: Connection, key: int, state: RewardState, reward: float | None) -> None:
    """What the trace is worth as a whole."""
    connection.execute(update(TraceRow).where(col(TraceRow.key) == key).values(reward_state=state.value, reward=reward))


def storable(text: str) -> str:
    """PostgreSQL has no NUL in its texts."""
    return text.replace("\0", "\ufffd")


def _upsert(connection: Connection, table: type[SQLModel], rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(_upsert_of(connection.dialect.name, table, tuple(rows[0])), rows)


@cache
def _upsert_of(dialect: str, table: type[SQLModel], names: tuple[str, ...]) -> Any:
    statement: Any = (sqlite.insert if dialect == "sqlite" else postgresql.insert)(table)
    keys = [column.name for column in table.__table__.primary_key]  # type: ignore[attr-defined]
    changed = {name: statement.excluded[name] for name in names if name not in keys}
    return statement.on_conflict_do_update(index_elements=keys, set_=changed)
