"""Schema 8: figures of training, one row per name and step; audits of suites."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Create both tables, empty: earlier releases recorded neither."""
    op.create_table(
        "figure",
        sa.Column("project", sa.String, primary_key=True),
        *(sa.Column(name, sa.Integer, primary_key=True, autoincrement=False) for name in ("version", "step")),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("value", sa.Float),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_table(
        "suite_audit",
        *(sa.Column(name, sa.String, primary_key=True) for name in ("project", "id")),
        sa.Column("body", sa.JSON, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
    )
