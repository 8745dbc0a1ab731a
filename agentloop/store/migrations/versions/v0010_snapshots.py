"""Schema 10: snapshots of what a loop that workers drive keeps in the folder of its project."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Create the table, empty: earlier releases ran each loop in the folder itself."""
    op.create_table(
        "snapshot",
        *(sa.Column(name, sa.String, primary_key=True) for name in ("project", "path")),
        sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("sha256", sa.String),
        sa.Column("made_at", sa.DateTime(timezone=True), nullable=False),
    )
