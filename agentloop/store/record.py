"""What a loop remembers beside its traces: finished stages, policy versions, reports and decisions."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import func
from sqlmodel import col, select

from agentloop.store.database import Database
from agentloop.store.tables import DecisionRow, EvalRow, PolicyRow, StageRow
from agentloop.types import Decision, EvalReport, PolicyVersion


class Record:
    """The part of the store that only a loop writes."""

    _database: Database

    def put_stage(self, row: StageRow) -> None:
        """Mark a stage as finished."""
        with self._database.session(write=True) as session:
            last = session.exec(select(func.max(StageRow.position))).one() or 0
            known = session.get(StageRow, row.name)
            row.position = known.position if known else last + 1
            session.merge(row)

    def stages(self) -> dict[str, StageRow]:
        """Finished stages by name, in the order in which they finished."""
        with self._database.session() as session:
            rows = session.exec(select(StageRow).order_by(col(StageRow.position)))
            return {row.name: row for row in rows}

    def put_version(self, version: PolicyVersion) -> None:
        """Insert or update by number."""
        with self._database.session(write=True) as session:
            session.merge(PolicyRow(**version.model_dump()))

    def versions(self) -> list[PolicyVersion]:
        """All versions by number."""
        with self._database.session() as session:
            rows = session.exec(select(PolicyRow).order_by(col(PolicyRow.number)))
            return [PolicyVersion.model_validate(row.model_dump()) for row in rows]

    def put_report(self, report: EvalReport) -> None:
        """Insert or replace."""
        row = EvalRow(
            suite_hash=report.suite_hash,
            policy_version=report.policy_version,
            body=report.model_dump(mode="json"),
        )
        with self._database.session(write=True) as session:
            session.merge(row)

    def report(self, suite_hash: str, policy_version: int) -> EvalReport | None:
        """What is known of a version on exactly this suite."""
        with self._database.session() as session:
            row = session.get(EvalRow, (suite_hash, policy_version))
            return EvalReport.model_validate(row.body) if row else None

    def put_decision(self, decision: Decision, versions: Iterable[PolicyVersion]) -> None:
        """A decision and the states it brings, in one transaction."""
        with self._database.session(write=True) as session:
            session.merge(DecisionRow(candidate=decision.candidate, body=decision.model_dump(mode="json")))
            for version in versions:
                session.merge(PolicyRow(**version.model_dump()))

    def decisions(self) -> dict[int, Decision]:
        """Decision by candidate number."""
        with self._database.session() as session:
            rows = session.exec(select(DecisionRow).order_by(col(DecisionRow.candidate)))
            return {row.candidate: Decision.model_validate(row.body) for row in rows}
