"""The behaviour of versions in their stored attempts: the input for comparing two versions, without any messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlmodel import col, select

from agentloop.store.database import Database
from agentloop.store.statements import chunks
from agentloop.store.tables import TraceRow
from agentloop.types import Purpose


class VersionAttempt(NamedTuple):
    """One attempt by which a version was measured."""

    task_id: str
    reward: float | None
    """None if infrastructure lost it, or if the reward is not known yet."""
    failure: str | None
    n_steps: int
    """Number of model calls."""
    n_prompt_tokens: int
    n_completion_tokens: int
    cost_usd: float | None


_COLUMNS = tuple(col(getattr(TraceRow, name)) for name in VersionAttempt._fields)
MEASURED = (Purpose.run, Purpose.evaluate)
"""Purposes of attempts on which a version was not trained."""


class Behaviour:
    """The part of the store that compares versions."""

    project: str
    _database: Database

    def version_attempts(self, number: int) -> list[VersionAttempt]:
        """Attempts of runs, gates and evaluations in the order of storage, without superseded ones."""
        query = select(*_COLUMNS).where(
            col(TraceRow.project) == self.project,
            col(TraceRow.policy_version) == number,
            col(TraceRow.purpose).in_(MEASURED),
            col(TraceRow.task_id).is_not(None),
            col(TraceRow.superseded).is_(None),
        )
        with self._database.read() as connection:
            return [VersionAttempt(*row) for row in connection.execute(query.order_by(col(TraceRow.key)))]

    def models_of(self, number: int) -> set[str]:
        """Names that the models of a version gave themselves in its traces."""
        query = select(col(TraceRow.model)).where(
            col(TraceRow.project) == self.project,
            col(TraceRow.policy_version) == number,
            col(TraceRow.model).is_not(None),
        )
        with self._database.read() as connection:
            return {name for name in connection.execute(query.distinct()).scalars() if name is not None}

    def failures_of(self, trace_ids: Sequence[str]) -> dict[str, str]:
        """Trace id -> type of its critical failure, for traces that have one and still exist."""
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
