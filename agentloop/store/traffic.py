"""Episodes of live traffic: what the gateway recorded of two versions since a time."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import NamedTuple

from sqlmodel import col, select

from agentloop.store.database import Database
from agentloop.store.sums import GATEWAY
from agentloop.store.tables import TraceRow


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


_COLUMNS = tuple(col(getattr(TraceRow, "id" if name == "trace_id" else name)) for name in TrafficEpisode._fields)


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
        return [one._replace(started_at=_aware(one.started_at)) for one in episodes]


def _aware(at: datetime) -> datetime:
    if at.tzinfo is None:
        return at.replace(tzinfo=UTC)
    return at
