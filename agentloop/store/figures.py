"""Figures of training: what each step of a version measured, while the version is made and after it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from sqlalchemy import delete, or_, select
from sqlmodel import col

from agentloop.store.database import Database
from agentloop.store.statements import insert_rows, stored_time
from agentloop.store.tables import FigureRow

NAMES = ("project", "version", "step", "name", "value", "at")
START = (0, -1)
"""(version, step) before every step."""


class StepFigures(NamedTuple):
    """One step of the making of a version."""

    version: int
    step: int
    at: datetime
    """When the last of its figures was recorded."""
    figures: dict[str, float]
    """Name -> value; nan where it was not a finite number."""


class FigureRows:
    """The part of the store that has the figures of training; all of it belongs to the store's `project`."""

    project: str
    _database: Database

    def put_figures(self, version: int, step: int, figures: Mapping[str, float], *, anew: bool = False) -> None:
        """Record figures of one step; one of the same name is replaced.

        anew: what is recorded of this step and of the later ones belongs to a run that was interrupted; remove it.
        """
        mine = (col(FigureRow.project) == self.project, col(FigureRow.version) == version)
        is_replaced = (col(FigureRow.step) == step) & col(FigureRow.name).in_(list(figures))
        with self._database.write() as connection:
            connection.execute(delete(FigureRow).where(*mine, col(FigureRow.step) >= step if anew else is_replaced))
            at = stored_time(connection, datetime.now(UTC))
            rows = [
                (self.project, version, step, name, float(value) if math.isfinite(value) else None, at)
                for name, value in figures.items()
            ]
            insert_rows(connection, "figure", NAMES, rows)

    def figures(
        self,
        first: int | None = None,
        last: int | None = None,
        *,
        names: Collection[str] = (),
        after: tuple[int, int] = START,
    ) -> list[StepFigures]:
        """Recorded steps, by version and step.

        first, last: versions. names: a name without a `/` also stands for all that begin with it and a `/`; none is
        every name. after: (version, step) of the last step that is not wanted.
        """
        version, step = col(FigureRow.version), col(FigureRow.step)
        query = select(version, step, col(FigureRow.name), col(FigureRow.value), col(FigureRow.at))
        query = query.where(col(FigureRow.project) == self.project)
        if after != START:
            query = query.where(or_(version > after[0], (version == after[0]) & (step > after[1])))
        if first is not None:
            query = query.where(version >= first)
        if last is not None:
            query = query.where(version <= last)
        if names:
            name = col(FigureRow.name)
            query = query.where(or_(name.in_(list(names)), *(name.startswith(f"{n}/", autoescape=True) for n in names)))
        query = query.order_by(version, step, col(FigureRow.name))
        steps: list[StepFigures] = []
        with self._database.read() as connection:
            for number, of_step, label, value, at in connection.execute(query):
                if not steps or steps[-1][:2] != (number, of_step):
                    steps.append(StepFigures(number, of_step, at, {}))
                steps[-1].figures[label] = math.nan if value is None else value
                steps[-1] = steps[-1]._replace(at=max(steps[-1].at, at))
        return steps
