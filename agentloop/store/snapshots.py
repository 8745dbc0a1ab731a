"""Snapshots: objects of the files from which a loop continues when workers drive it.

Each row is one change of one path, and can exist once. The newest row of a path describes its present state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection

from agentloop.store.database import Database
from agentloop.store.portable import ask, in_transaction
from agentloop.store.statements import insert_rows

_NAMES = ("project", "path", "step", "sha256", "made_at")
_NEWEST = (
    "SELECT path, step, sha256 FROM snapshot s WHERE project = $1 "
    "AND step = (SELECT max(step) FROM snapshot WHERE project = s.project AND path = s.path) ORDER BY path"
)


class Snapshot(NamedTuple):
    """A path of a project at one step."""

    path: str
    """Relative to the folder of the project."""
    step: int
    """Number of the path's change."""
    sha256: str | None
    """Of its object; None if it was removed."""


class Snapshots:
    """The part of the store that keeps snapshots. All of it belongs to the store's `project`."""

    project: str
    _database: Database

    def put_snapshots(self, snapshots: Sequence[Snapshot]) -> None:
        """Adds changes in one transaction. Raises StoreError if one of them exists."""

        def put(connection: Connection) -> None:
            [[moment]] = ask(connection, "SELECT {now}")
            # No `ignore`: a step that exists was written by another driver, which this one must not follow.
            insert_rows(connection, "snapshot", _NAMES, [(self.project, *one, moment) for one in snapshots])

        if snapshots:
            in_transaction(self._database, put)

    def snapshots(self) -> dict[str, Snapshot]:
        """The newest change of each path, also of those that were removed."""
        with self._database.read() as connection:
            rows = [Snapshot(*row) for row in ask(connection, _NEWEST, (self.project,))]
        return {one.path: one for one in rows}
