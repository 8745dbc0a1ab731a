"""Schema 3: keys may have a limit of calls per minute."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the limit; existing keys have none."""
    op.add_column("api_key", sa.Column("max_calls_per_minute", sa.BigInteger))
