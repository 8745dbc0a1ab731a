"""Schema 1: a loop's own episodes, versions, reports and decisions. Released, so it must not be changed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "trace",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("episode_id", sa.String, nullable=False, unique=True),
        sa.Column("stage", sa.String, nullable=False),
        sa.Column("n", sa.Integer, nullable=False),
        sa.Column("task_id", sa.String, nullable=False),
        sa.Column("pool", sa.String, nullable=False),
        sa.Column("split", sa.String, nullable=False),
        sa.Column("purpose", sa.String, nullable=False),
        sa.Column("group", sa.String, nullable=False),
        sa.Column("policy_version", sa.Integer, nullable=False),
        sa.Column("seed", sa.Integer, nullable=False),
        sa.Column("episode_state", sa.String, nullable=False),
        sa.Column("stop_reason", sa.String, nullable=False),
        sa.Column("reward_state", sa.String, nullable=False),
        sa.Column("reward", sa.Float),
        sa.Column("failure", sa.String),
        sa.Column("n_steps", sa.Integer, nullable=False),
        sa.Column("n_tool_calls", sa.Integer, nullable=False),
        sa.Column("answer", sa.String),
        sa.Column("error", sa.String),
        sa.Column("started_at", sa.DateTime, nullable=False),
        sa.Column("duration_s", sa.Float, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index("trace_by_pool", "trace", ["pool", "split", "reward"])
    op.create_index("trace_by_stage", "trace", ["stage", "n"])
    op.create_index("ix_trace_failure", "trace", ["failure"])
    op.create_index("ix_trace_policy_version", "trace", ["policy_version"])
    op.create_index("ix_trace_task_id", "trace", ["task_id"])
    op.create_table(
        "policy_version",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("parent", sa.Integer),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("artifact", sa.String),
        sa.Column("sha256", sa.String, nullable=False),
        sa.Column("config_hash", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("note", sa.String, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_table(
        "eval_report",
        sa.Column("suite_hash", sa.String, primary_key=True),
        sa.Column("policy_version", sa.Integer, primary_key=True),
        sa.Column("body", sa.JSON, nullable=False),
    )
    op.create_table(
        "decision",
        sa.Column("candidate", sa.Integer, primary_key=True),
        sa.Column("body", sa.JSON, nullable=False),
    )
    op.create_table(
        "stage",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("n_episodes", sa.Integer, nullable=False),
        sa.Column("n_tool_calls", sa.Integer, nullable=False),
        sa.Column("wall_s", sa.Float, nullable=False),
        sa.Column("cpu_s", sa.Float, nullable=False),
        sa.Column("dropped", sa.JSON, nullable=False),
        sa.Column("metrics", sa.JSON, nullable=False),
    )
