"""Schema 9: runs, their queues and units, and the workers that lease the units."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Create the tables, empty: earlier releases worked in one process and left no units."""
    op.create_table(
        "run",
        sa.Column("number", _KEY, primary_key=True),
        *(sa.Column(name, sa.String, nullable=False) for name in ("project", "kind", "name", "state")),
        sa.Column("weight", sa.Float, nullable=False),
        sa.Column("asks", sa.String, nullable=False),
        *(sa.Column(name, sa.String) for name in ("bundle", "config_hash")),
        *(sa.Column(name, sa.String, nullable=False) for name in ("progress", "result", "why")),
        sa.Column("made_at", _TIME, nullable=False),
        sa.Column("ended_at", _TIME),
    )
    is_open = sa.text("state IN ('running', 'paused')")
    op.create_index(
        "run_by_name", "run", ["project", "name"], unique=True, sqlite_where=is_open, postgresql_where=is_open
    )
    op.create_index("run_by_project", "run", ["project", "number"])
    op.create_table(
        "queue",
        sa.Column("number", _KEY, primary_key=True),
        sa.Column("project", sa.String, nullable=False),
        sa.Column("run", sa.BigInteger, nullable=False),
        *(sa.Column(name, sa.String, nullable=False) for name in ("kind", "needs")),
        sa.UniqueConstraint("run", "kind", "needs"),
    )
    _unit()
    op.create_table(
        "worker",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("host", sa.String, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        *(sa.Column(name, sa.String, nullable=False) for name in ("version", "kinds", "has")),
        *(sa.Column(name, sa.Integer, nullable=False) for name in ("n_slots", "n_busy")),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("lease_s", sa.Float, nullable=False),
        sa.Column("note", sa.String, nullable=False),
        *(sa.Column(name, _TIME, nullable=False) for name in ("started_at", "beat_at")),
    )


def _unit() -> None:
    op.create_table(
        "unit",
        sa.Column("number", _KEY, primary_key=True),
        *(sa.Column(name, sa.String, nullable=False) for name in ("project", "key")),
        sa.Column("queue", sa.BigInteger, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        *(sa.Column(name, sa.Integer, nullable=False) for name in ("rank", "position")),
        sa.Column("limit_s", sa.Float, nullable=False),
        sa.Column("asks", sa.String, nullable=False),
        *(sa.Column(name, sa.Integer, nullable=False) for name in ("epoch", "n_deaths", "n_lost")),
        sa.Column("owner", sa.String),
        sa.Column("not_before", _TIME),
        sa.Column("result", sa.String),
        *(sa.Column(name, sa.String, nullable=False) for name in ("error", "history")),
        sa.Column("made_at", _TIME, nullable=False),
        *(sa.Column(name, _TIME) for name in ("leased_at", "ended_at")),
        sa.UniqueConstraint("project", "key"),
    )
    for name, columns, state in (
        ("unit_ready", ["queue", "rank", "position", "number"], "ready"),
        ("unit_leased", ["owner"], "leased"),
        ("unit_leased_by_queue", ["queue"], "leased"),
        ("unit_dead", ["queue"], "dead"),
    ):
        only = sa.text(f"state = '{state}'")
        op.create_index(name, "unit", columns, sqlite_where=only, postgresql_where=only)
