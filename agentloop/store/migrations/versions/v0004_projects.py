"""Schema 4: versions, stages, reports and decisions belong to a project, and so does the lease of the writer."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_TIME = sa.DateTime(timezone=True)
_OF_STAGE = ("name", "position", "n_episodes", "n_tool_calls", "wall_s", "cpu_s", "dropped", "metrics")
_OF_VERSION = ("number", "parent", "kind", "artifact", "sha256", "config_hash", "state", "note", "created_at")


def upgrade() -> None:
    """Recreate the four tables. Existing rows belong to the project `default`, like all episodes of loops."""
    _anew(
        "policy_version",
        _OF_VERSION,
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("parent", sa.Integer),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("artifact", sa.String),
        *(sa.Column(name, sa.String, nullable=False) for name in ("sha256", "config_hash", "state", "note")),
        sa.Column("created_at", _TIME, nullable=False),
    )
    _anew(
        "eval_report",
        ("suite_hash", "policy_version", "body"),
        sa.Column("suite_hash", sa.String, primary_key=True),
        sa.Column("policy_version", sa.Integer, primary_key=True),
        sa.Column("body", sa.JSON, nullable=False),
    )
    _anew(
        "decision",
        ("candidate", "body"),
        sa.Column("candidate", sa.Integer, primary_key=True),
        sa.Column("body", sa.JSON, nullable=False),
    )
    _anew(
        "stage",
        _OF_STAGE,
        sa.Column("name", sa.String, primary_key=True),
        *(sa.Column(name, sa.Integer, nullable=False) for name in ("position", "n_episodes", "n_tool_calls")),
        *(sa.Column(name, sa.Float, nullable=False) for name in ("wall_s", "cpu_s")),
        *(sa.Column(name, sa.JSON, nullable=False) for name in ("dropped", "metrics")),
    )
    for name, columns in (("trace_by_pool", ["pool", "split", "reward"]), ("trace_by_stage", ["stage", "n"])):
        op.drop_index(name, "trace")
        op.create_index(name, "trace", ["project", *columns])
    op.create_table(
        "lease",
        sa.Column("project", sa.String, primary_key=True),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("ends_at", _TIME, nullable=False),
    )


def _anew(table: str, copied: tuple[str, ...], *columns: sa.Column[Any]) -> None:
    """Recreate a table with its rows, because SQLite cannot change a primary key."""
    op.rename_table(table, f"{table}_3")
    op.create_table(table, sa.Column("project", sa.String, primary_key=True), *columns)
    names = ", ".join(copied)
    op.execute(f"INSERT INTO {table} (project, {names}) SELECT 'default', {names} FROM {table}_3")  # noqa: S608
    op.drop_table(f"{table}_3")
