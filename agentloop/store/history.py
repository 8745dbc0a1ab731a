"""What traces were found to be worth, one verdict after another: none is overwritten, each has a time and a name.

The tables `score`, `label` and `trace` have what is true now, for search; `verdict` has what was ever said.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Connection, delete, exists, func, select
from sqlmodel import col

from agentloop.store.database import Database, chunks, insert_rows
from agentloop.store.past import Past, last_rows, past, read_verdict, with_persons
from agentloop.store.query import conditions
from agentloop.store.redact import Redactor
from agentloop.store.shared import SharedBodies
from agentloop.store.tables import AgreementRow, LabelRow, ScoreRow, TraceRow, TraceSummary, VerdictRow, columns
from agentloop.store.verdicts import JUDGE, LABELLED, PERSON, begins, put_labels, put_scores, storable, trace_key
from agentloop.types import Failure, FailureType, RewardState, Score, Verdict

HUMAN = "human"
"""The verifier of a person's word; its `source` is the person."""
MAX_QUEUE = 1000
Given = TypeVar("Given", Verdict, Score, Failure)
HISTORY = ("trace_key", "given_at", "by", "why", "state", "reward", "stamp", "body")


class New(NamedTuple):
    """A verdict that is to be the trace's."""

    key: int
    verdict: Verdict
    stamp: str | None = None
    by: str = JUDGE
    why: str = ""


class Stored(NamedTuple):
    """A trace as it is judged again: its row, and what its last verdict was judged by."""

    row: Any
    stamp: str | None
    by: str | None
    why: str
    given: dict[str, Score]
    """By verifier, what others than the judge said last."""
    last: Any = None
    """The newest row of its history; None where it has none."""

    @property
    def verdict(self) -> Verdict | None:
        """The newest verdict of its history."""
        return None if self.last is None else past(self.last).verdict


class History:
    """The part of the store that judging again needs."""

    _database: Database
    _shared: SharedBodies

    def put_verdicts(self, new: Sequence[New], *, within: Connection | None = None) -> None:
        """In one transaction. A verdict that is there already adds nothing to the history."""
        with self._database.write(within=within) as connection:
            changed = replace_verdicts(connection, self._shared, new)
            rewrite(connection, self._shared, changed)

    def clean(self, verdict: Verdict) -> Verdict:
        """The verdict as it is stored: without secrets."""
        return clean(self._shared.redactor, verdict)

    def resolve(self, project: str, trace_id: str, verdict: Verdict, reward: float, *, by: str, why: str) -> None:
        """A person's word, with the verdict that follows from it. Raises NoSuchTrace."""
        with self._database.write() as connection:
            key = trace_key(connection, project, trace_id)
            by, why = self._shared.redactor.text(by), self._shared.redactor.text(why)
            new = [New(key, verdict, None, by, why)]
            replace_verdicts(connection, self._shared, new)
            rewrite(connection, self._shared, new)
            put_scores(connection, [(key, [Score(verifier=HUMAN, version="1", value=reward)])], by)

    def put_person_label(self, project: str, trace_id: str, failure: Failure, *, by: str, why: str) -> bool:
        """A person's label in place of the one that the same person gave before; critical where it says so.

        failure: `detector` and name are set here. Returns False where the same label was there already.
        Raises NoSuchTrace.
        """
        redactor = self._shared.redactor
        by, why = redactor.text(by), redactor.text(why)
        failure = clean(redactor, failure.model_copy(update={"detector": PERSON + by}))
        with self._database.write() as connection:
            key = trace_key(connection, project, trace_id)
            row = connection.execute(select(*columns(TraceRow)).where(col(TraceRow.key) == key)).one()
            before = read_verdict(connection, row)
            mine = [one for one in before.failures if one.detector == failure.detector]
            if mine == [failure]:
                return False
            connection.execute(
                delete(LabelRow).where(
                    col(LabelRow.trace_key) == row.key, col(LabelRow.detector) == storable(failure.detector)
                )
            )
            put_labels(connection, [(row.key, [failure])])
            verdict = read_verdict(connection, row)
            _append(connection, [New(row.key, verdict, None, LABELLED + by, why)], {})
            return True

    def person_labels(self, project: str) -> list[tuple[str, Failure]]:
        """(trace, label) of every trace that people labelled in a project: the newest of each, the oldest first."""
        query = select(col(TraceRow.id), *columns(LabelRow)).where(
            col(TraceRow.key) == col(LabelRow.trace_key),
            col(TraceRow.project) == project,
            begins(col(LabelRow.detector), PERSON),
        )
        with self._database.read() as connection:
            rows = list(connection.execute(query.order_by(col(LabelRow.given_at), col(LabelRow.detector))))
        newest = {row.id: _label(row) for row in rows}
        return list(newest.items())

    def history(self, project: str, trace_id: str) -> list[Past]:
        """Every verdict on a trace, the oldest first. Raises NoSuchTrace."""
        with self._database.read() as connection:
            key = trace_key(connection, project, trace_id)
            query = select(*columns(VerdictRow)).where(col(VerdictRow.trace_key) == key)
            return list(with_persons(past(row) for row in connection.execute(query.order_by(col(VerdictRow.key)))))

    def stored(self, filter: str, *, project: str | None, after: int, limit: int) -> list[Stored]:
        """Traces for which a filter holds with their bodies, those first that were stored first, beyond key `after`."""
        query = select(*columns(TraceRow)).where(*conditions(filter, self._database.engine.dialect.name))
        query = query.where(col(TraceRow.key) > after).order_by(col(TraceRow.key)).limit(limit)
        if project is not None:
            query = query.where(col(TraceRow.project) == project)
        with self._database.read() as connection:
            rows = list(connection.execute(query))
            keys = [row.key for row in rows]
            last = dict(last_rows(connection, keys))
            given = _given(connection, keys)
        return [Stored(row, *_judged_by(last.get(row.key)), given.get(row.key, {}), last.get(row.key)) for row in rows]

    def group(self, row: Any) -> list[Any]:
        """The rows of all episodes of ours that are compared with that of `row`, itself among them, in their order."""
        same = [col(getattr(TraceRow, name)) == getattr(row, name) for name in ("project", "stage", "group", "task_id")]
        with self._database.read() as connection:
            return list(connection.execute(select(*columns(TraceRow)).where(*same).order_by(col(TraceRow.key))))

    def n_found(self, filter: str) -> int:
        """How many traces a filter holds for. Raises ConfigError for one that is none."""
        query = select(func.count()).select_from(TraceRow)
        with self._database.read() as connection:
            where = conditions(filter, self._database.engine.dialect.name)
            return int(connection.execute(query.where(*where)).scalar_one())

    def queue(self, project: str, *, sample: int = 0) -> list[tuple[TraceSummary, str]]:
        """(trace, why a person is asked): what is disputed or waits for one, then `sample` others.

        The sample is of scored traces that no person has judged, and the same until one has: ids are random.
        """
        mine = select(*columns(TraceRow, without=("body", "bodies"))).where(col(TraceRow.project) == project)
        mine = mine.limit(MAX_QUEUE)
        waits = exists().where(
            col(ScoreRow.trace_key) == col(TraceRow.key), col(ScoreRow.error).startswith("waiting: a person")
        )
        labelled = exists().where(col(ScoreRow.trace_key) == col(TraceRow.key), col(ScoreRow.verifier) == HUMAN)
        state, newest = col(TraceRow.reward_state), col(TraceRow.key).desc()
        asked = {
            "disputed": mine.where(state == "disputed").order_by(newest),
            "waiting": mine.where(state == "unscored", waits).order_by(newest),
            "sampled": mine.where(state == "scored", ~labelled).order_by(col(TraceRow.id)).limit(sample),
        }
        with self._database.read() as connection:
            found = {why: connection.execute(query).mappings().all() for why, query in asked.items()}
        return [(TraceSummary.model_construct(**dict(row)), why) for why, rows in found.items() for row in rows]

    def gold(self, filter: str, *, project: str) -> Iterator[tuple[str, str, str, float, float]]:
        """(trace, verifier, its version, its number, a person's) wherever there are both; the last person counts."""
        query = select(col(TraceRow.key), col(TraceRow.id)).where(
            col(TraceRow.project) == project, *conditions(filter, self._database.engine.dialect.name)
        )
        person = select(col(ScoreRow.trace_key)).where(
            col(ScoreRow.verifier) == HUMAN, col(ScoreRow.value).is_not(None)
        )
        with self._database.read() as connection:
            ids = {row.key: row.id for row in connection.execute(query.where(col(TraceRow.key).in_(person)))}
            for part in chunks(sorted(ids)):
                scores = select(*columns(ScoreRow)).where(col(ScoreRow.trace_key).in_(part))
                rows = list(connection.execute(scores.order_by(col(ScoreRow.given_at))))
                gold = {row.trace_key: row.value for row in rows if row.verifier == HUMAN and row.value is not None}
                for row in rows:
                    if row.verifier != HUMAN and row.value is not None:
                        yield ids[row.trace_key], row.verifier, row.version, row.value, gold[row.trace_key]

    def put_agreement(self, rows: Sequence[AgreementRow]) -> None:
        """Insert, or replace what was measured of the same version."""
        with self._database.session(write=True) as session:
            for row in rows:
                session.merge(row)

    def agreements(self, project: str) -> list[AgreementRow]:
        """What was measured last of each version of each verifier."""
        query = select(AgreementRow).where(col(AgreementRow.project) == project)
        with self._database.session() as session:
            rows = session.execute(query.order_by(col(AgreementRow.verifier), col(AgreementRow.version))).scalars()
            return list(rows)


def replace_verdicts(connection: Connection, shared: SharedBodies, new: Sequence[New]) -> list[New]:
    """Scores and labels of ours in place of those before; what others said stays, and stays critical.

    Returns the verdicts that differ from what is stored; of the others only the stamp is written.
    """
    new = [item._replace(verdict=clean(shared.redactor, item.verdict)) for item in new]
    last = dict(last_rows(connection, [item.key for item in new]))
    changed = _changed(connection, new, last)
    keys = [item.key for item in changed]
    for part in chunks(keys):
        mine = col(ScoreRow.trace_key).in_(part)
        connection.execute(delete(ScoreRow).where(mine, col(ScoreRow.source) == JUDGE))
    _remove_labels(connection, {key: last[key] for key in keys if key in last})
    theirs = _critical(connection, keys)
    put_scores(connection, ((item.key, item.verdict.scores) for item in changed), JUDGE)
    put_labels(connection, ((item.key, item.verdict.failures) for item in changed), keep=theirs)
    _append(connection, new, last)
    return changed


def settled(new: New, last: Any) -> New:
    """What becomes of a verdict of ours: where somebody else has said what the trace is worth, that stands.

    last: the newest row of the trace's history; None where it has none.
    """
    before = None if last is None else past(last)
    if before is None or before.by == JUDGE or before.verdict.state is not RewardState.scored:
        return new
    verdict = before.verdict.model_copy(update={"scores": new.verdict.scores})
    return new._replace(verdict=verdict, by=before.by, why=before.why)


def _changed(connection: Connection, new: Sequence[New], last: dict[int, Any]) -> list[New]:
    """Those of `new` that the history, the trace's row or its labels do not say already."""
    keys = [item.key for item in new]
    worth: dict[int, tuple[str, float | None]] = {}
    labels: dict[int, set[tuple[str, str, int, str]]] = {}
    for part in chunks(keys):
        query = select(col(TraceRow.key), col(TraceRow.reward_state), col(TraceRow.reward))
        for key, state, reward in connection.execute(query.where(col(TraceRow.key).in_(part))):
            worth[key or 0] = (state, reward)
        of_trace = select(*columns(LabelRow)).where(col(LabelRow.trace_key).in_(part))
        for row in connection.execute(of_trace):
            labels.setdefault(row.trace_key, set()).add((row.detector, row.type, row.step, row.evidence))
    return [
        item
        for item in new
        if item.key not in last
        or past(last[item.key]).verdict != item.verdict
        or worth.get(item.key) != (item.verdict.state.value, item.verdict.reward)
        or not _rows(item.verdict) <= labels.get(item.key, set())
    ]


def _rows(verdict: Verdict) -> set[tuple[str, str, int, str]]:
    """The labels of a verdict as the table `label` has them."""
    return {
        (storable(one.detector), one.type.value, -1 if one.step is None else one.step, storable(one.evidence))
        for one in verdict.failures
    }


def append(connection: Connection, shared: SharedBodies, new: New) -> None:
    """A word on the whole, beside scores and labels that stay as they are."""
    by, why = shared.redactor.text(new.by), shared.redactor.text(new.why)
    cleaned = new._replace(verdict=clean(shared.redactor, new.verdict), by=by, why=why)
    _append(connection, [cleaned], dict(last_rows(connection, [new.key])))
    rewrite(connection, shared, [cleaned])


def _append(connection: Connection, new: Sequence[New], last: dict[int, Any]) -> None:
    now = datetime.now(UTC)
    rows: list[tuple[Any, ...]] = []
    stamps = []
    for item in new:
        body = zlib.compress(item.verdict.model_dump_json().encode(), level=1)
        before = last.get(item.key)
        if before is not None and (before.body, before.by, before.why) == (body, item.by, item.why):
            if item.stamp is not None and before.stamp != item.stamp:
                stamps.append((item.stamp, before.key))
            continue
        verdict = item.verdict
        rows.append((item.key, now, item.by, item.why, verdict.state.value, verdict.reward, item.stamp, body))
    if connection.dialect.name == "sqlite":  # the driver has no times of its own
        rows = [(key, f"{at:%Y-%m-%d %H:%M:%S.%f}", *more) for key, at, *more in rows]
    insert_rows(connection, "verdict", HISTORY, rows)
    mark = "?" if connection.dialect.name == "sqlite" else "%s"
    if stamps:
        connection.exec_driver_sql(f"UPDATE verdict SET stamp = {mark} WHERE key = {mark}", stamps)  # noqa: S608


def rewrite(connection: Connection, shared: SharedBodies, new: Sequence[New]) -> None:
    """The row of a trace, and the verdict in the body of an episode of ours."""
    verdicts = {item.key: item.verdict for item in new}
    theirs = _critical(connection, list(verdicts))
    rows = []
    for part in chunks(list(verdicts)):
        query = select(col(TraceRow.key), col(TraceRow.body), col(TraceRow.stage)).where(col(TraceRow.key).in_(part))
        for key, body, stage in connection.execute(query):
            verdict = verdicts[key or 0]
            critical = theirs.get(key or 0) or (verdict.critical.type.value if verdict.critical else None)
            critical = None if verdict.reward is not None and verdict.reward >= 1.0 else critical
            if stage is not None and body is not None:  # an episode of ours
                trace = zlib.decompress(body).partition(b"\n")[0]
                told = shared.redactor.json(verdict.model_dump_json().encode())
                body = zlib.compress(b"\n".join((trace, told)), level=1)
            rows.append((verdict.state.value, verdict.reward, critical, body, key))
    mark = "?" if connection.dialect.name == "sqlite" else "%s"
    columns = ("reward_state", "reward", "failure", "body")
    changed = ", ".join(f"{name} = {mark}" for name in columns)
    if rows:
        connection.exec_driver_sql(f"UPDATE trace SET {changed} WHERE key = {mark}", rows)  # noqa: S608


def clean(redactor: Redactor, given: Given) -> Given:
    """A verdict, score or failure without secrets."""
    raw = given.model_dump_json().encode()
    told = redactor.json(raw)
    return given if told is raw else given.model_validate_json(told)


def _remove_labels(connection: Connection, last: dict[int, Any]) -> None:
    """Those that the last verdict had given."""
    rows = [
        (key, f.detector, f.type.value, -1 if f.step is None else f.step)
        for key, row in last.items()
        for f in past(row).verdict.failures
    ]
    mark = "?" if connection.dialect.name == "sqlite" else "%s"
    same = " AND ".join(f"{name} = {mark}" for name in ("trace_key", "detector", "type", "step"))
    if rows:
        connection.exec_driver_sql(f"DELETE FROM label WHERE {same}", rows)  # noqa: S608


def _critical(connection: Connection, keys: Sequence[int]) -> dict[int, str]:
    """Trace -> what others than our last verdicts found critical in it."""
    found: dict[int, str] = {}
    last = dict(last_rows(connection, keys))
    for part in chunks(keys):
        query = select(*columns(LabelRow)).where(col(LabelRow.trace_key).in_(part), col(LabelRow.critical))
        for row in connection.execute(query):
            before = last.get(row.trace_key)
            ours = {failure.detector for failure in past(before).verdict.failures} if before is not None else set()
            if row.detector not in ours:
                found[row.trace_key] = row.type
    return found


def _given(connection: Connection, keys: Sequence[int]) -> dict[int, dict[str, Score]]:
    found: dict[int, dict[str, Score]] = {}
    for part in chunks(keys):
        query = select(*columns(ScoreRow)).where(col(ScoreRow.trace_key).in_(part), col(ScoreRow.source) != JUDGE)
        for row in connection.execute(query.order_by(col(ScoreRow.given_at))):
            score = Score(verifier=row.verifier, version=row.version, value=row.value, error=row.error)
            found.setdefault(row.trace_key, {})[row.verifier] = score
    return found


def _label(row: Any) -> Failure:
    return Failure(
        type=FailureType(row.type),
        step=None if row.step < 0 else row.step,
        evidence=row.evidence,
        detector=row.detector,
        confidence=row.confidence,
        critical=row.critical,
    )


def _judged_by(row: Any) -> tuple[str | None, str | None, str]:
    return (None, None, "") if row is None else (row.stamp, row.by, row.why)
