"""A loop's own attempts in: each is inserted once with its verdict, and none is replaced.

What costs (redaction, JSON, compression, words) is done before the transaction, so that writers do not wait for it.
The statements are written out, because building them costs more than storing an attempt.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, or_, select
from sqlmodel import col

from agentloop.errors import AttemptConflict
from agentloop.store import documents
from agentloop.store.bodies import pack_json
from agentloop.store.database import Database, chunks, insert_new, insert_rows, pipeline, stored_time
from agentloop.store.history import HISTORY, clean
from agentloop.store.quotes import requoted
from agentloop.store.redact import Redactor
from agentloop.store.shared import Batch, SharedBodies, link
from agentloop.store.tables import TraceRow
from agentloop.store.traces import clean_texts, put_facets, remove_traces
from agentloop.store.verdicts import JUDGE, storable
from agentloop.types import Attempt, RewardState, Verdict

_SCORE = ("trace_key", "verifier", "source", "version", "value", "error", "given_at")
_LABEL = ("trace_key", "detector", "type", "step", "evidence", "confidence", "critical", "given_at")


class Placed(NamedTuple):
    """An attempt, with its stage and its position in that."""

    stage: str
    n: int
    attempt: Attempt


class _Ready(NamedTuple):
    """An attempt as it is stored: without secrets, its bodies named."""

    id: str
    row: dict[str, Any]
    bodies: list[bytes]
    facets: documents.Facets
    verdict: Verdict
    history: bytes
    """The verdict, compressed."""


class _Lost(Exception):
    """Attempts that give their place to others stand where those are to be; `keys` of their traces."""

    def __init__(self, keys: list[int]) -> None:
        self.keys = keys


_STORED = select(
    *(col(getattr(TraceRow, name)) for name in ("key", "id", "episode_id", "stage", "reward_state", "body"))
).where(
    col(TraceRow.project) == bindparam("project"),
    or_(
        col(TraceRow.id).in_(bindparam("ids", expanding=True)),
        col(TraceRow.episode_id).in_(bindparam("episodes", expanding=True)) & col(TraceRow.stage).is_not(None),
    ),
)


def put_attempts(
    database: Database,
    shared: SharedBodies,
    project: str,
    new: Sequence[Placed],
    *,
    anew: bool = False,
    within: Connection | None = None,
) -> None:
    """Write attempts in one transaction, that of `within` where it is given. One that is there already is left.

    An attempt that was lost to infrastructure gives its place to another of the same id; that removes bodies, and so is
    not done `within` a transaction. anew: so does any other, because its outcome counted nowhere. Raises
    AttemptConflict where an id belongs to another attempt, and writes nothing.
    """
    if not new:
        return
    batch = shared.batch(project)
    ready = [_prepare(shared.redactor, project, placed, batch.name) for placed in new]
    # In one order for all writers, so that no two wait for each other; keys follow the order of the plan.
    ready.sort(key=lambda one: (one.row["stage"], one.row["n"], one.id))
    try:
        with database.write(within=within) as connection:
            _write(connection, shared, project, ready, batch, anew=anew)
    except _Lost as lost:
        if within is not None:
            raise AttemptConflict(
                "an attempt that would give its place is stored under the same id; put this one without `within`"
            ) from None
        with database.write(removes=True) as connection:
            remove_traces(connection, lost.keys)
            _write(connection, shared, project, ready, batch, anew=anew)
    batch.done()


def _write(
    connection: Connection, shared: SharedBodies, project: str, ready: Sequence[_Ready], batch: Batch, *, anew: bool
) -> None:
    rows = [tuple(one.row.values()) for one in ready]
    keys: dict[str, int] = dict(insert_new(connection, "trace", tuple(ready[0].row), rows, ("id", "key")))
    if len(keys) < len(ready):
        _check(connection, project, [one for one in ready if one.id not in keys], anew=anew)
        ready = [one for one in ready if one.id in keys]
    bodies = batch.put(connection)
    with pipeline(connection):
        link(connection, ((keys[one.id], bodies[name]) for one in ready for name in one.bodies))
        put_facets(connection, shared.redactor, ((keys[one.id], one.facets) for one in ready))
        _put_verdicts(connection, keys, ready)


def _check(connection: Connection, project: str, refused: Sequence[_Ready], *, anew: bool) -> None:
    """Pass over the attempts that are stored already. Raises _Lost and AttemptConflict for the others."""
    rows: list[Any] = []
    for part in chunks(refused):
        names = {"ids": [one.id for one in part], "episodes": [one.row["episode_id"] for one in part]}
        rows += connection.execute(_STORED, {"project": project, **names}).all()
    by_id, by_episode = {row.id: row for row in rows}, {row.episode_id: row for row in rows}
    lost = []
    for one in refused:
        stored = by_id.get(one.id) or by_episode[one.row["episode_id"]]
        if stored.id == one.id and stored.stage is not None and _trace(stored.body) == _trace(one.row["body"]):
            continue
        if stored.stage is not None and (anew or stored.reward_state == RewardState.infra_failed):
            lost.append(stored.key)
            continue
        raise AttemptConflict(
            f"trace {one.id} of episode {one.row['episode_id']} (stage {one.row['stage']!r}) is another attempt than "
            f"the one that is stored as trace {stored.id} (stage {stored.stage!r}); attempts are never replaced: give "
            "the run another seed or project, or remove that trace first"
        )
    if lost:
        raise _Lost(lost)


def _trace(body: bytes) -> bytes:
    """The trace in the body of an attempt, as JSON. Its verdict may have been followed by others since."""
    return zlib.decompress(body).partition(b"\n")[0]


def _prepare(redactor: Redactor, project: str, placed: Placed, name: Callable[[bytes], bytes]) -> _Ready:
    """name: remembers a body, and names it."""
    task, episode, trace = placed.attempt.task, placed.attempt.episode, placed.attempt.trace
    verdict = placed.attempt.verdict
    raw = trace.model_dump_json().encode()
    told = redactor.json(raw)
    verdict = clean(redactor, verdict) if told is raw else requoted(clean(redactor, verdict), told)
    judged = verdict.model_dump_json().encode()
    values, facets = documents.columns(trace)
    critical = verdict.critical if verdict.reward is None or verdict.reward < 1.0 else None
    row = clean_texts(redactor, values) | {
        "project": project,
        "id": trace.id,
        "episode_id": episode.id,
        "stage": placed.stage,
        "n": placed.n,
        "n_spans": 0,
        "task_id": task.id,
        "pool": task.pool,
        "split": task.split.value,
        "purpose": episode.purpose.value,
        "group": episode.group,
        "policy_version": episode.policy_version,
        "seed": episode.seed,
        "episode_state": episode.state.value,
        "reward_state": verdict.state.value,
        "reward": verdict.reward,
        "failure": critical.type.value if critical else None,
        "stored_at": datetime.now(UTC),
        "body": pack_json(told, judged),
    }
    bodies = [name(body) for body in documents.split_bodies(raw)]
    return _Ready(trace.id, row, bodies, facets, verdict, zlib.compress(judged, level=1))


def _put_verdicts(connection: Connection, keys: Mapping[str, int], ready: Sequence[_Ready]) -> None:
    """Scores, labels and the first verdict of the history; nobody can have said anything of these attempts yet."""
    now = stored_time(connection, datetime.now(UTC))
    scores, labels, history = {}, {}, []
    for one in ready:
        key, verdict = keys[one.id], one.verdict
        for score in verdict.scores:
            source, error = storable(score.source or JUDGE), score.error and storable(score.error)
            row = (key, storable(score.verifier), source, storable(score.version), score.value, error, now)
            scores[row[:3]] = row
        for failure in verdict.failures:
            step = -1 if failure.step is None else failure.step
            name = (key, storable(failure.detector), failure.type.value, step)
            is_critical = failure is verdict.critical
            labels[name] = (*name, storable(failure.evidence), failure.confidence, is_critical, now)
        history.append((key, now, JUDGE, "", verdict.state.value, verdict.reward, None, one.history))
    insert_rows(connection, "score", _SCORE, list(scores.values()))
    insert_rows(connection, "label", _LABEL, list(labels.values()))
    insert_rows(connection, "verdict", HISTORY, history)
