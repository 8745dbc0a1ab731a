"""Schema 12: objects that can be swept, chores that workers share, and model servers that serve versions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Create the tables, empty. An object that an earlier release stored has no row, and stays."""
    op.create_table(
        "stored_object",
        sa.Column("sha256", sa.String, primary_key=True),
        _time("put_at"),
    )
    op.create_table("chore", sa.Column("name", sa.String, primary_key=True), _time("begun_at"))
    op.create_table(
        "endpoint",
        *(sa.Column(name, sa.String, primary_key=True) for name in ("project", "url")),
        *(sa.Column(name, sa.String, nullable=False) for name in ("host", "models", "note")),
        sa.Column("lease_s", sa.Float, nullable=False),
        _time("started_at"),
        _time("beat_at"),
    )


def _time(name: str) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=False)
