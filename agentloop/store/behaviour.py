"""How versions behaved in their stored attempts: what a comparison of two versions reads, without any message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlmodel import col, select

from agentloop.store.database import Database
from agentloop.store.statements import chunks
from agentloop.store.tables import TraceRow
from agentloop.types import Purpose


class VersionAttempt(NamedTuple):
    """One attempt that a version was measured by."""

    task_id: str
    reward: float | None
    """None where infrastructure lost it, or nobody knows yet."""
    failure: str | None
    n_steps: int
    """Calls of the model."""
    n_prompt_tokens: int
    n_completion_tokens: int
    cost_usd: float | None


_COLUMNS = tuple(col(getattr(TraceRow, name)) for name in VersionAttempt._fields)
MEASURED = (Purpose.run, Purpose.evaluate)
"""Attempts that a version was not trained on."""


class Behaviour:
    """The part of the store that compares versions."""

    project: str
    _database: Database

    def version_attempts(self, number: int) -> list[VersionAttempt]:
        """Of runs, gates and evaluations, in the order in which they were stored; without superseded ones."""
        query = select(*_COLUMNS).where(
            col(TraceRow.project) == self.project,
            col(TraceRow.policy_version) == number,
            col(TraceRow.purpose).in_(MEASURED),
            col(TraceRow.task_id).is_not(None),
            col(TraceRow.superseded).is_(None),
        )
        with self._database.read() as connection:
            return [VersionAttempt(*row) for row in connection.execute(query.order_by(col(TraceRow.key)))]

    def failures_of(self, trace_ids: Sequence[str]) -> dict[str, str]:
        """Trace id -> type of its critical failure, of those that have one and are still stored."""
        failures: dict[str, str] = {}
        with self._database.read() as connection:
            for part in chunks(trace_ids):
                query = select(col(TraceRow.id), col(TraceRow.failure)).where(
                    col(TraceRow.project) == self.project,
                    col(TraceRow.id).in_(part),
                    col(TraceRow.failure).is_not(None),
                )
                failures |= {trace_id: str(failure) for trace_id, failure in connection.execute(query)}
        return failures
