"""Schema 8: figures of training, one row a name and step."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Steps of earlier versions were not recorded, so the table begins empty."""
    op.create_table(
        "figure",
        sa.Column("project", sa.String, primary_key=True),
        *(sa.Column(name, sa.Integer, primary_key=True, autoincrement=False) for name in ("version", "step")),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("value", sa.Float),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
    )
