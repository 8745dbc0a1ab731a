"""Schema 11: what pages need: sessions, who looked at or reviews a trace, rejected labels, results of gates."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Create the tables, empty: earlier releases had no pages."""
    op.create_table(
        "web_session",
        sa.Column("sha256", sa.String, primary_key=True),
        sa.Column("key_id", sa.String, nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_table(
        "trace_visit",
        *(sa.Column(name, sa.String, primary_key=True) for name in ("project", "trace_id", "by")),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_table(
        "reservation",
        *(sa.Column(name, sa.String, primary_key=True) for name in ("project", "trace_id")),
        sa.Column("by", sa.String, nullable=False),
        sa.Column("ends_at", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_table(
        "label_rejection",
        sa.Column("trace_key", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("type", sa.String, primary_key=True),
        sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("by", sa.String, primary_key=True),
        sa.Column("labels", sa.JSON, nullable=False),
        sa.Column("given_at", sa.DateTime(timezone=True), nullable=False),
    )
    disputed = sa.text("reward_state = 'disputed'")
    op.create_index("trace_disputed", "trace", ["project", "key"], sqlite_where=disputed, postgresql_where=disputed)
    op.add_column("evidence", sa.Column("result", sa.LargeBinary))
    op.create_index(
        "trace_by_outcome",
        "trace",
        ["project", "purpose", "policy_version", "task_id", "reward_state", "reward"],
        sqlite_where=sa.text("task_id IS NOT NULL AND superseded IS NULL"),
        postgresql_where=sa.text("task_id IS NOT NULL AND superseded IS NULL"),
    )
