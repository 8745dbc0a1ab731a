"""The one door to what is remembered: a SQLite file in WAL mode.

A write returns after it is committed to disk (synchronous=FULL), so what was acknowledged survives
`kill -9` and a power cut. Every write can be repeated with the same ids and has the same effect.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, event, func, or_, text
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import DatabaseError
from sqlmodel import Session, SQLModel, col, create_engine, delete, select

from agentloop.errors import StoreError
from agentloop.store.bodies import pack, unpack
from agentloop.store.tables import SCHEMA_VERSION, DecisionRow, EvalRow, PolicyRow, StageRow, TraceRow
from agentloop.types import Decision, Episode, EvalReport, PolicyVersion, Task, Trace, Verdict

Judged = tuple[Task, Episode, Trace, Verdict]
"""An episode with everything that is known of it."""


class Store:
    """Open with `Store(path)`; `lock()` it while a loop writes, so that only one does."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        """Raises StoreError when there is no store at `path` (create=False) or it cannot be used."""
        self.path = path
        if not create and not path.is_file():
            raise StoreError(
                f"no trace store at {path}; name the folder of a project that has run with -p/--project, "
                "or make traces with `agentloop loop` or `agentloop demo`"
            )
        with self._explained():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._engine = _engine(path)
            self._check_schema()

    def close(self) -> None:
        """Let go of the file."""
        self._engine.dispose()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the store for one writer; the lock dies with the process. Raises StoreError when it is taken."""
        with ExitStack() as held:
            with self._explained():
                handle = held.enter_context(open(self.path.with_suffix(".lock"), "a+"))
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    handle.seek(0)
                    raise StoreError(
                        f"{self.path} is in use by process {handle.read().strip()}; wait for it or end it"
                    ) from None
                handle.truncate(0)
                handle.write(str(os.getpid()))
                handle.flush()
            yield

    # ------------------------------------------------------------------------------ traces

    def put_judged(self, stage: str, judged: Sequence[Judged], *, first: int = 0) -> None:
        """Write episodes with traces and verdicts in one transaction; ids that are there are replaced."""
        rows = [_trace_row(stage, first + i, *item) for i, item in enumerate(judged)]
        if not rows:
            return
        statement = insert(TraceRow)
        changed = {
            c.name: statement.excluded[c.name] for c in SQLModel.metadata.tables["trace"].columns if c.name != "id"
        }
        with self._session() as session:
            session.execute(statement.on_conflict_do_update(index_elements=["id"], set_=changed), rows)

    def forget_stage(self, stage: str) -> int:
        """Remove the traces of a stage that was cut short and will be done again; their number."""
        with self._session() as session:
            return session.exec(delete(TraceRow).where(col(TraceRow.stage) == stage)).rowcount

    def stage_traces(self, stage: str) -> list[TraceRow]:
        """The rows of one stage in the order in which they were made."""
        with self._session() as session:
            return list(session.exec(select(TraceRow).where(TraceRow.stage == stage).order_by(col(TraceRow.n))))

    def passing(self, pool: str, purpose: str, limit: int = 64) -> list[TraceRow]:
        """Train-split traces of one task pool that succeeded, in the order in which they were made."""
        query = select(TraceRow).where(
            TraceRow.pool == pool, TraceRow.split == "train", TraceRow.purpose == purpose, TraceRow.reward == 1.0
        )
        with self._session() as session:
            return list(session.exec(query.order_by(col(TraceRow.n)).limit(limit)))

    def find_traces(self, *, limit: int, stage: str | None = None, **equal: object) -> list[TraceRow]:
        """Rows whose columns have the given values, newest first; None asks nothing of a column.

        stage: `gate-v1` finds those of every state of the suite, `gate-v1.1a2b3c` of one.
        """
        query = select(TraceRow)
        if stage is not None:
            query = query.where(
                or_(col(TraceRow.stage) == stage, col(TraceRow.stage).startswith(f"{stage}.", autoescape=True))
            )
        for column, value in equal.items():
            if value is not None:
                query = query.where(getattr(TraceRow, column) == value)
        query = query.order_by(col(TraceRow.started_at).desc(), col(TraceRow.id)).limit(limit)
        with self._session() as session:
            return list(session.exec(query))

    def values(self, column: str) -> list[Any]:
        """What traces have in `column`, each value once, in order."""
        query = select(getattr(TraceRow, column)).distinct().order_by(getattr(TraceRow, column))
        with self._session() as session:
            return list(session.exec(query))

    def task_ids(self, *purposes: str) -> set[str]:
        """Tasks that were rolled out for any of `purposes`, whatever came of it."""
        query = select(TraceRow.task_id).where(col(TraceRow.purpose).in_(purposes)).distinct()
        with self._session() as session:
            return set(session.exec(query))

    def trace(self, prefix: str) -> tuple[TraceRow, Trace, Verdict]:
        """The one trace whose id begins with `prefix`. Raises StoreError when there is none or more than one."""
        query = select(TraceRow).where(col(TraceRow.id).startswith(prefix, autoescape=True)).limit(2)
        with self._session() as session:
            rows = list(session.exec(query))
        if not rows:
            raise StoreError(f"no trace with an id that begins with {prefix!r}; `agentloop traces ls` shows them")
        if len(rows) > 1:
            found = " and ".join(row.id for row in rows)
            raise StoreError(
                f"more than one trace with an id that begins with {prefix!r}; give more of it: {found} are two of them"
            )
        return rows[0], *unpack(rows[0].body)

    def n_traces(self, **equal: object) -> int:
        """How many traces there are whose columns have the given values."""
        query = select(func.count()).select_from(TraceRow)
        for column, value in equal.items():
            query = query.where(getattr(TraceRow, column) == value)
        with self._session() as session:
            return session.exec(query).one()

    # ------------------------------------------------------------- stages, versions, decisions

    def put_stage(self, row: StageRow) -> None:
        """Mark a stage as finished."""
        with self._session() as session:
            session.merge(row)

    def stages(self) -> dict[str, StageRow]:
        """Finished stages by name, in the order in which they finished."""
        with self._session() as session:
            rows = session.exec(select(StageRow).order_by(text("rowid")))
            return {row.name: row for row in rows}

    def put_version(self, version: PolicyVersion) -> None:
        """Insert or update by number."""
        with self._session() as session:
            session.merge(PolicyRow(**version.model_dump()))

    def versions(self) -> list[PolicyVersion]:
        """All versions by number."""
        with self._session() as session:
            rows = session.exec(select(PolicyRow).order_by(col(PolicyRow.number)))
            return [PolicyVersion.model_validate(row.model_dump()) for row in rows]

    def put_report(self, report: EvalReport) -> None:
        """Insert or replace."""
        row = EvalRow(
            suite_hash=report.suite_hash,
            policy_version=report.policy_version,
            body=report.model_dump(mode="json"),
        )
        with self._session() as session:
            session.merge(row)

    def report(self, suite_hash: str, policy_version: int) -> EvalReport | None:
        """What is known of a version on exactly this suite."""
        with self._session() as session:
            row = session.get(EvalRow, (suite_hash, policy_version))
            return EvalReport.model_validate(row.body) if row else None

    def put_decision(self, decision: Decision, versions: Iterable[PolicyVersion]) -> None:
        """A decision and the states it brings, in one transaction."""
        with self._session() as session:
            session.merge(DecisionRow(candidate=decision.candidate, body=decision.model_dump(mode="json")))
            for version in versions:
                session.merge(PolicyRow(**version.model_dump()))

    def decisions(self) -> dict[int, Decision]:
        """Decision by candidate number."""
        with self._session() as session:
            rows = session.exec(select(DecisionRow).order_by(col(DecisionRow.candidate)))
            return {row.candidate: Decision.model_validate(row.body) for row in rows}

    # ------------------------------------------------------------------------------ inside

    @contextmanager
    def _session(self) -> Iterator[Session]:
        with self._explained(), Session(self._engine, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """SQLite's and the file system's words, with the file and the next move."""
        try:
            yield
        except DatabaseError as error:
            raise StoreError(f"{self.path}: {error.orig}; {_remedy(str(error.orig))}") from error
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{error.filename or self.path}: {error.strerror}; {_remedy(str(error))}") from error

    def _check_schema(self) -> None:
        with self._engine.begin() as connection:
            found = connection.execute(text("PRAGMA user_version")).scalar_one()
            if found == 0:
                SQLModel.metadata.create_all(connection)
                connection.execute(text(f"PRAGMA user_version = {SCHEMA_VERSION}"))
            elif found != SCHEMA_VERSION:
                raise StoreError(
                    f"{self.path} has schema {found}, this agentloop writes {SCHEMA_VERSION}; use another folder"
                )


def _engine(path: Path) -> Engine:
    # Made from its parts, because in a URL that is written out a `?` in the path would begin the options.
    engine = create_engine(URL.create("sqlite", database=str(path)), connect_args={"timeout": 30})

    @event.listens_for(engine, "connect")
    def _pragmas(connection: Any, _: object) -> None:
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "busy_timeout = 30000"):
            connection.execute(f"PRAGMA {pragma}")

    return engine


def _remedy(problem: str) -> str:
    lowered = problem.lower()
    if "full" in lowered or "no space" in lowered:
        return "free some space there, then run the same command again: it continues"
    if "read" in lowered or "permission" in lowered or "unable to open" in lowered:
        return "choose a folder that can be written"
    if "not a database" in lowered or "malformed" in lowered:
        return "this is no trace store; choose another folder"
    return "then run the same command again"


def _trace_row(stage: str, n: int, task: Task, episode: Episode, trace: Trace, verdict: Verdict) -> dict[str, object]:
    critical = verdict.critical
    return {
        "id": trace.id,
        "episode_id": episode.id,
        "stage": stage,
        "n": n,
        "task_id": task.id,
        "pool": task.pool,
        "split": task.split.value,
        "purpose": episode.purpose,
        "group": episode.group,
        "policy_version": episode.policy_version,
        "seed": episode.seed,
        "episode_state": episode.state.value,
        "stop_reason": trace.stop_reason.value,
        "reward_state": verdict.state.value,
        "reward": verdict.reward,
        "failure": critical.type.value if critical else None,
        "n_steps": len(trace.steps),
        "n_tool_calls": sum(len(step.completion.message.tool_calls) for step in trace.steps),
        "answer": trace.answer,
        "error": trace.error,
        "started_at": trace.started_at,
        "duration_s": trace.duration_s,
        "body": pack(trace, verdict),
    }
