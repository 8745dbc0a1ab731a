"""Runs: requests that consist of units (`units.py`).

A process that begins a run continues the run of that name if it has not ended, such as a loop after a kill.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson
from sqlalchemy import Connection

from agentloop.errors import NoSuchWork, StateError
from agentloop.store.database import Database
from agentloop.store.portable import as_time, ask, in_transaction
from agentloop.types import RunEnd, RunFacts, RunState, UnitState
from agentloop.types.unit import runs_before, units_before

ENDS = (RunState.done, RunState.failed, RunState.cancelled)
"""States of a run that has ended."""
_NAMES = (
    *("number", "project", "kind", "name", "state", "weight", "asks", "bundle", "config_hash", "progress", "result"),
    *("why", "made_at", "ended_at"),
)
_SELECT = f"SELECT {', '.join(_NAMES)} FROM run WHERE project = $1"  # noqa: S608
_OPEN = "state IN ('running', 'paused')"
_BEGIN = (
    "INSERT INTO run (project, kind, name, state, weight, asks, bundle, config_hash, progress, result, why, made_at) "
    "VALUES ($1, $2, $3, 'running', $4, $5, $6, $7, '{}', '{}', '', {now}) ON CONFLICT DO NOTHING"
)


class Runs:
    """The part of the store that keeps runs. All of it belongs to the store's `project`."""

    project: str
    _database: Database

    def begin_run(
        self,
        kind: str,
        name: str,
        *,
        asks: Mapping[str, Any] | None = None,
        weight: float = 1.0,
        bundle: str | None = None,
        config_hash: str | None = None,
    ) -> RunFacts:
        """The run of that name that has not ended, else a new one. Raises StateError if it has other settings.

        asks: the request, as JSON. weight: its share of the workers, relative to other runs. bundle: SHA-256 of
        the files that its units read.
        """
        if not weight > 0:
            raise ValueError(f"run {name!r} has weight {weight:g}; its weight must be above 0")
        text = orjson.dumps(dict(asks or {})).decode()

        def begin(connection: Connection) -> RunFacts:
            # Insert, then read: the unique index over open runs decides which of two processes begins the run, and both
            # read it.
            ask(connection, _BEGIN, (self.project, kind, name, weight, text, bundle, config_hash))
            [row] = ask(connection, f"{_SELECT} AND name = $2 AND {_OPEN}", (self.project, name))
            return _facts(row)

        run = in_transaction(self._database, begin)
        if (run.kind, run.config_hash) != (kind, config_hash):
            raise StateError(
                f"run {run.number} ({name}) goes on with other settings; wait for it, or end it with "
                f"`agentloop queue cancel {run.number}`"
            )
        return run

    def run(self, number: int) -> RunFacts:
        """The run with that number. Raises NoSuchWork if the project has none."""
        with self._database.read() as connection:
            return read_run(connection, self.project, number)

    def runs(self, *, ended: bool = False) -> list[RunFacts]:
        """Runs that have not ended, the oldest first. ended: also those that have."""
        where = "" if ended else f"AND {_OPEN} "
        with self._database.read() as connection:
            return [_facts(row) for row in ask(connection, f"{_SELECT} {where}ORDER BY number", (self.project,))]

    def put_progress(self, number: int, progress: Mapping[str, Any]) -> None:
        """Replaces the progress that followers of the run see."""
        text = orjson.dumps(dict(progress)).decode()
        with self._database.write() as connection:
            statement = "UPDATE run SET progress = $1 WHERE project = $2 AND number = $3"
            ask(connection, statement, (text, self.project, number))

    def move_run(
        self, number: int, after: RunState, *, why: str = "", result: Mapping[str, Any] | None = None
    ) -> RunFacts:
        """Pauses, continues or ends a run. The units that an ended run leaves are cancelled.

        Raises StateError for a move that `types.unit.RUN_MOVES` does not have.
        """
        text = orjson.dumps(dict(result or {})).decode()

        def move(connection: Connection) -> RunFacts:
            # The condition is part of the update, so of two moves at once only one finds a state that allows it.
            before = runs_before(after)
            ended = "{now}" if after in ENDS else "NULL"
            rows = ask(
                connection,
                f"UPDATE run SET state = $1, why = $2, result = $3, ended_at = {ended} "  # noqa: S608
                f"WHERE project = $4 AND number = $5 AND state IN ({listed(before)}) RETURNING number",
                (after.value, why, text, self.project, number),
            )
            run = read_run(connection, self.project, number)
            if not rows:
                raise StateError(f"run {number} ({run.name}) is {run.state} and cannot become {after}")
            if after in ENDS:
                ask(connection, _CANCEL, (number,))
            return run

        return in_transaction(self._database, move)


def end_run(connection: Connection, number: int, end: RunEnd) -> None:
    """Ends a run, unless it has ended, in an open transaction. Its unfinished units are cancelled."""
    text = orjson.dumps(dict(end.result)).decode()
    rows = ask(connection, _END, (end.state.value, end.why, text, number))
    if rows:
        ask(connection, _CANCEL, (number,))


def read_run(connection: Connection, project: str, number: int) -> RunFacts:
    """The run with that number. Raises NoSuchWork if the project has none."""
    rows = ask(connection, f"{_SELECT} AND number = $2", (project, number))
    if not rows:
        raise NoSuchWork(f"project {project!r} has no run {number}; `agentloop queue ls` shows its runs")
    return _facts(rows[0])


def listed(states: Iterable[str]) -> str:
    """States as a list in SQL."""
    return ", ".join(f"'{state}'" for state in states)


_END = (
    "UPDATE run SET state = $1, why = $2, result = $3, ended_at = {now} "
    "WHERE number = $4 AND state IN ('running', 'paused') RETURNING number"
)
_UNFINISHED = tuple(state for state in units_before(UnitState.cancelled) if state != UnitState.dead)
"""Dead units stay dead, so that people see which units killed their workers."""
_CANCEL = (
    "UPDATE unit SET state = 'cancelled', ended_at = {now} "  # noqa: S608
    f"WHERE state IN ({listed(_UNFINISHED)}) AND queue IN (SELECT number FROM queue WHERE run = $1)"
)


def _facts(row: tuple[Any, ...]) -> RunFacts:
    values = dict(zip(_NAMES, row, strict=True))
    for name in ("asks", "progress", "result"):
        values[name] = orjson.loads(values[name])
    for name in ("made_at", "ended_at"):
        values[name] = as_time(values[name])
    return RunFacts.model_validate(values)
