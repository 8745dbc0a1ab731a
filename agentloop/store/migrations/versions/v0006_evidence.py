"""Schema 6: repeated attempts are kept as superseded; outcomes and looks of gates and banks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """No attempt is superseded yet, and gates have their outcomes in files."""
    op.add_column("trace", sa.Column("superseded", sa.String))
    op.create_table(
        "evidence",
        *(sa.Column(name, sa.String, primary_key=True) for name in ("project", "id")),
        *(sa.Column(name, sa.String, nullable=False) for name in ("kind", "key")),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("about", sa.JSON, nullable=False),
        sa.Column("verdict", sa.String),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_index("evidence_by_key", "evidence", ["project", "kind", "key", "number"], unique=True)
    op.create_table(
        "outcome",
        sa.Column("key", _KEY, primary_key=True),
        *(sa.Column(name, sa.String, nullable=False) for name in ("project", "evidence")),
        sa.Column("position", sa.Integer),
        *(sa.Column(name, sa.String, nullable=False) for name in ("suite", "suite_hash", "task_id", "side")),
        sa.Column("trial", sa.BigInteger, nullable=False),
        sa.Column("policy_version", sa.Integer, nullable=False),
        sa.Column("trace_id", sa.String),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("reward", sa.Float),
        sa.Column("body", sa.String, nullable=False),
    )
    op.create_index("outcome_by_evidence", "outcome", ["project", "evidence", "position"], unique=True)
    op.create_index("outcome_by_task", "outcome", ["project", "suite", "task_id", "policy_version"])
    op.create_table(
        "look",
        *(sa.Column(name, sa.String, primary_key=True) for name in ("project", "evidence", "suite")),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("n", sa.Integer, nullable=False),
        *(sa.Column(name, sa.Float, nullable=False) for name in ("e_fail", "e_pass", "mean", "low", "high")),
    )
