"""Schema 7: versions with parts and lineage, one live and one canary a project; moves, proofs, feedback, proposals."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_TIME = sa.DateTime(timezone=True)
SETTINGS_KINDS = ("remote", "scripted")
"""Kinds of schema 6 that became kind `settings`."""


def upgrade() -> None:
    """Convert versions. Of their history only the current state is known, and becomes their first move."""
    op.add_column("policy_version", sa.Column("parts", sa.JSON, nullable=False, server_default="{}"))
    op.add_column("policy_version", sa.Column("unhashed", sa.JSON, nullable=False, server_default="[]"))
    op.add_column("policy_version", sa.Column("lineage", sa.JSON))
    versions = sa.table("policy_version", *(sa.column(name) for name in ("project", "number", "kind", "state", "note")))
    op.execute(versions.update().where(versions.c.kind.in_(SETTINGS_KINDS)).values(kind="settings"))
    for state in ("live", "canary"):
        only = sa.text(f"state = '{state}'")
        name = f"policy_{state}"
        op.create_index(name, "policy_version", ["project"], unique=True, sqlite_where=only, postgresql_where=only)
    _tables()
    _decisions()
    op.execute(
        # `1 = 0` is FALSE in both databases: SQLite has no boolean type, PostgreSQL refuses a number for one.
        "INSERT INTO policy_move (project, version, before, after, by, why, is_override, is_shadow, at) "
        "SELECT project, number, NULL, state, 'agentloop store upgrade', 'its state at that time', 1 = 0, 1 = 0, "
        "created_at FROM policy_version"
    )


def _decisions() -> None:
    """Remove p-values, from which no e-value can be computed; the decisions' reasons still mention them."""
    rows = sa.table("decision", sa.column("project"), sa.column("candidate"), sa.column("body", sa.JSON))
    connection = op.get_bind()
    for project, candidate, body in connection.execute(sa.select(rows)).all():
        changed = {name: value for name, value in body.items() if name not in ("p_better", "p_worse")}
        mine = (rows.c.project == project, rows.c.candidate == candidate)
        connection.execute(rows.update().where(*mine).values(body=changed | {"n": body["n_tasks"]}))


def _tables() -> None:
    op.create_table(
        "policy_move",
        sa.Column("key", _KEY, primary_key=True),
        sa.Column("project", sa.String, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("before", sa.String),
        *(sa.Column(name, sa.String, nullable=False) for name in ("after", "by", "why")),
        sa.Column("proof", sa.JSON),
        sa.Column("is_override", sa.Boolean, nullable=False),
        sa.Column("share", sa.Float),
        sa.Column("is_shadow", sa.Boolean, nullable=False),
        sa.Column("at", _TIME, nullable=False),
    )
    op.create_index("policy_move_by_version", "policy_move", ["project", "version", "key"])
    op.create_table(
        "proof",
        sa.Column("key", _KEY, primary_key=True),
        *(sa.Column(name, sa.String, nullable=False) for name in ("project", "id", "candidate", "baseline")),
        sa.Column("body", sa.JSON, nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.UniqueConstraint("project", "id"),
    )
    op.create_index("proof_by_candidate", "proof", ["project", "candidate", "key"])
    op.create_table(
        "feedback",
        sa.Column("key", _KEY, primary_key=True),
        sa.Column("trace_key", sa.BigInteger, nullable=False),
        *(sa.Column(name, sa.String, nullable=False) for name in ("source", "by")),
        sa.Column("score", sa.Float),
        sa.Column("text", sa.String, nullable=False),
        sa.Column("is_self_reported", sa.Boolean, nullable=False),
        sa.Column("given_at", _TIME, nullable=False),
    )
    op.create_index("feedback_by_trace", "feedback", ["trace_key", "key"])
    op.create_table(
        "proposal",
        *(sa.Column(name, sa.String, primary_key=True) for name in ("project", "id")),
        sa.Column("version", sa.Integer, nullable=False),
        *(sa.Column(name, sa.String, nullable=False) for name in ("request", "answer")),
        sa.Column("cost_usd", sa.Float),
        sa.Column("given_at", _TIME, nullable=False),
    )
