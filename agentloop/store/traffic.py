"""Episodes of live traffic: what the gateway recorded of two versions since a time."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlmodel import col, func, select

from agentloop.store.database import Database
from agentloop.store.sums import GATEWAY
from agentloop.store.tables import TraceRow, VerdictRow


class TrafficEpisode(NamedTuple):
    """One episode through the gateway."""

    trace_id: str
    policy_version: int
    started_at: datetime
    reward_state: str
    reward: float | None
    task_id: str | None
    model: str | None
    """As the provider named it in its answers."""
    failure: str | None = None
    """Type of its critical failure."""
    rewarded_at: datetime | None = None
    """When its first reward came; None where the history of its verdicts does not tell."""


_FIRST_REWARD = (
    select(func.min(col(VerdictRow.given_at)))
    .where(col(VerdictRow.trace_key) == col(TraceRow.key), col(VerdictRow.reward).is_not(None))
    .correlate(TraceRow)
    .scalar_subquery()
)
_OTHERS = {"trace_id": col(TraceRow.id), "rewarded_at": _FIRST_REWARD.label("rewarded_at")}
"""Fields that are no column of the same name."""
_COLUMNS: tuple[Any, ...] = tuple(_OTHERS.get(n, getattr(TraceRow, n, None)) for n in TrafficEpisode._fields)


class Traffic:
    """The part of the store that a canary is judged by."""

    project: str
    _database: Database

    def traffic(self, versions: Collection[int], since: datetime) -> list[TrafficEpisode]:
        """Episodes of the project that began since then, in that order.

        Attempts of a loop, gate or run are none of them, and neither are traces that only say which version they had.
        """
        query = select(*_COLUMNS).where(
            col(TraceRow.project) == self.project,
            col(TraceRow.policy_version).in_(versions),
            col(TraceRow.source) == GATEWAY,
            col(TraceRow.stage).is_(None),
            col(TraceRow.started_at) >= since,
        )
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(col(TraceRow.started_at), col(TraceRow.id)))
            episodes = [TrafficEpisode(*row) for row in rows]
        return [
            one._replace(started_at=_aware(one.started_at), rewarded_at=one.rewarded_at and _aware(one.rewarded_at))
            for one in episodes
        ]


def _aware(at: datetime) -> datetime:
    if at.tzinfo is None:
        return at.replace(tzinfo=UTC)
    return at
