"""Schema 5: a stage has columns for what its name implies: its kind, version, state of the suite and sandbox."""

from __future__ import annotations

import re

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_NAME = re.compile(r"(demonstrate|warm-start|turn|gate|control|run)(?:-v?(\d+))?(?:\.([0-9a-f]{6}))?")
_IMPLIED = {"warm-start": 1, "control": 0}
"""Versions of stages whose names contain none."""
_SUITE = sa.text("SELECT suite_hash FROM eval_report WHERE project = :project AND suite_hash LIKE :start")
_FILL = sa.text(
    "UPDATE stage SET kind = :kind, version = :version, suite_hash = :suite WHERE project = :project AND name = :name"
)


def upgrade() -> None:
    """Add the columns, and fill them from the names of existing stages."""
    op.add_column("stage", sa.Column("kind", sa.String, nullable=False, server_default="other"))
    op.add_column("stage", sa.Column("version", sa.Integer))
    op.add_column("stage", sa.Column("suite_hash", sa.String))
    op.add_column("stage", sa.Column("sandbox", sa.String))
    connection = op.get_bind()
    for project, name in connection.execute(sa.text("SELECT project, name FROM stage")).all():
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        kind, number, start = match.groups()
        version = int(number) if number else _IMPLIED.get(kind)
        if version is not None and kind == "turn":  # turn 1 made version 2
            version += 1
        suite = connection.execute(_SUITE, {"project": project, "start": f"{start}%"}).scalar() if start else None
        values = {"kind": kind, "version": version, "suite": suite, "project": project, "name": name}
        connection.execute(_FILL, values)
