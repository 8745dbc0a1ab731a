"""Schema 3: keys may be bounded in calls a minute."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the bound; keys that there are have none."""
    op.add_column("api_key", sa.Column("max_calls_per_minute", sa.BigInteger))
