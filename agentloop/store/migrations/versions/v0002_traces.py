"""Schema 2: traces from anywhere, with spans, shared bodies, scores, labels and full text."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from agentloop.store.fulltext import CREATE_POSTGRESQL, CREATE_SQLITE

revision = "0002"
down_revision = "0001"

_KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_TIME = sa.DateTime(timezone=True)
_OWN = (
    "id", "episode_id", "stage", "n", "task_id", "pool", "split", "purpose", "group", "policy_version", "seed",
    "episode_state", "stop_reason", "reward_state", "reward", "failure", "n_steps", "n_tool_calls", "answer", "error",
    "started_at", "duration_s", "body",
)  # fmt: skip


def upgrade() -> None:
    """Recreate `trace` with a number as its key, and create the new tables."""
    for index in ("trace_by_pool", "trace_by_stage", "ix_trace_failure", "ix_trace_policy_version", "ix_trace_task_id"):
        op.drop_index(index, "trace")
    op.rename_table("trace", "trace_1")
    _trace()
    columns = ", ".join(f'"{name}"' for name in _OWN)
    op.execute(
        f"INSERT INTO trace ({columns}, project, source, n_spans, n_errors, n_prompt_tokens, n_completion_tokens, "  # noqa: S608
        f"stored_at) SELECT {columns}, 'default', 'agentloop 1', 0, 0, 0, 0, started_at FROM trace_1 "
        "ORDER BY started_at, stage, n"
    )
    op.drop_table("trace_1")
    _spans()
    _bodies()
    _verdicts()
    op.create_table(
        "setting",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("value", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "api_key",
        sa.Column("id", sa.String, primary_key=True),
        *(sa.Column(name, sa.String, nullable=False) for name in ("sha256", "project", "scopes")),
        sa.Column("made_at", _TIME, nullable=False),
        *(sa.Column(name, sa.BigInteger) for name in ("max_calls", "max_tokens")),
        sa.Column("max_usd", sa.Float),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("n_calls", "n_tokens")),
        sa.Column("cost_usd", sa.Float, nullable=False),
    )
    op.add_column("stage", sa.Column("position", sa.Integer, nullable=False, server_default="0"))
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    if is_sqlite:
        # Schema 1 has no order of stages but that in which SQLite inserted them.
        op.execute("UPDATE stage SET position = rowid")
    for statement in CREATE_SQLITE if is_sqlite else CREATE_POSTGRESQL:
        op.execute(statement)


def _trace() -> None:
    texts = ("source_id", "name", "session", "agent", "model", "episode_id", "stage")
    op.create_table(
        "trace",
        sa.Column("key", _KEY, primary_key=True),
        sa.Column("project", sa.String, nullable=False),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("source", sa.String, nullable=False),
        *(sa.Column(name, sa.String) for name in texts),
        sa.Column("n", sa.Integer),
        *(sa.Column(name, sa.String) for name in ("task_id", "pool", "split", "purpose", "group")),
        sa.Column("policy_version", sa.Integer),
        sa.Column("seed", sa.BigInteger),
        sa.Column("episode_state", sa.String),
        sa.Column("stop_reason", sa.String),
        sa.Column("reward_state", sa.String, nullable=False),
        sa.Column("reward", sa.Float),
        sa.Column("failure", sa.String),
        *(sa.Column(name, sa.Integer, nullable=False) for name in ("n_steps", "n_tool_calls", "n_spans", "n_errors")),
        sa.Column("n_prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("n_completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("cost_usd", sa.Float),
        sa.Column("answer", sa.String),
        sa.Column("error", sa.String),
        sa.Column("started_at", _TIME),
        sa.Column("duration_s", sa.Float, nullable=False),
        sa.Column("stored_at", _TIME, nullable=False),
        sa.Column("body", sa.LargeBinary),
        sa.Column("bodies", sa.LargeBinary),
        sa.UniqueConstraint("project", "id"),
    )
    op.create_index("trace_by_pool", "trace", ["pool", "split", "reward"])
    op.create_index("trace_by_stage", "trace", ["stage", "n"])
    op.create_index("trace_by_failure", "trace", ["project", "failure", "key"])
    op.create_index("trace_by_session", "trace", ["project", "session", "key"])
    ours, linked = sa.text("stage IS NOT NULL"), sa.text("episode_id IS NOT NULL")
    for name, unique, where in (("trace_of_episode", True, ours), ("trace_by_episode", False, linked)):
        columns = ["project", "episode_id"]
        op.create_index(name, "trace", columns, unique=unique, sqlite_where=where, postgresql_where=where)
    op.create_index("trace_by_project", "trace", ["project", "key"])
    op.create_index("trace_by_source", "trace", ["source"])
    op.create_index("trace_by_age", "trace", ["stored_at"])
    op.create_index("ix_trace_policy_version", "trace", ["policy_version"])
    op.create_index("ix_trace_task_id", "trace", ["task_id"])


def _spans() -> None:
    op.create_table(
        "span",
        sa.Column("trace_key", sa.BigInteger, primary_key=True),
        sa.Column("span_id", sa.String, primary_key=True),
        sa.Column("parent_id", sa.String),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("start_ns", sa.BigInteger, nullable=False),
        sa.Column("end_ns", sa.BigInteger, nullable=False),
        *(sa.Column(name, sa.String) for name in ("error", "session", "agent", "model", "tool")),
        sa.Column("n_prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("n_completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("cost_usd", sa.Float),
        *(sa.Column(name, sa.String) for name in ("episode_id", "task_id")),
        sa.Column("policy_version", sa.Integer),
        sa.Column("reward", sa.Float),
        sa.Column("response_id", sa.String),
        sa.Column("head", sa.LargeBinary, nullable=False),
        sa.Column("bodies", sa.LargeBinary, nullable=False),
    )
    op.create_index("span_by_time", "span", ["trace_key", "start_ns", "span_id"])
    is_call, answered = sa.text("kind = 'chat'"), sa.text("response_id IS NOT NULL")
    for name, column, where in (
        ("span_call_by_parent", "parent_id", is_call),
        ("span_by_response", "response_id", answered),
    ):
        op.create_index(name, "span", ["trace_key", column], sqlite_where=where, postgresql_where=where)


def _bodies() -> None:
    op.create_table(
        "body",
        sa.Column("key", _KEY, primary_key=True),
        sa.Column("hash", sa.LargeBinary, nullable=False, unique=True),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "trace_body",
        sa.Column("trace_key", sa.BigInteger, primary_key=True),
        sa.Column("body_key", sa.BigInteger, primary_key=True),
        sqlite_with_rowid=False,
    )
    op.create_index("trace_body_by_body", "trace_body", ["body_key", "trace_key"])
    op.create_table(
        "facet",
        sa.Column("trace_key", sa.BigInteger, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("value", sa.String, primary_key=True),
        sqlite_with_rowid=False,
    )
    op.create_index("facet_by_value", "facet", ["name", "value", "trace_key"])


def _verdicts() -> None:
    op.create_table(
        "score",
        sa.Column("trace_key", sa.BigInteger, primary_key=True),
        sa.Column("verifier", sa.String, primary_key=True),
        sa.Column("source", sa.String, primary_key=True),
        sa.Column("version", sa.String, nullable=False),
        sa.Column("value", sa.Float),
        sa.Column("error", sa.String),
        sa.Column("given_at", _TIME, nullable=False),
    )
    op.create_index("score_by_verifier", "score", ["verifier", "value", "trace_key"])
    op.create_table(
        "label",
        sa.Column("trace_key", sa.BigInteger, primary_key=True),
        sa.Column("detector", sa.String, primary_key=True),
        sa.Column("type", sa.String, primary_key=True),
        sa.Column("step", sa.Integer, primary_key=True),
        sa.Column("evidence", sa.String, nullable=False),
        sa.Column("confidence", sa.Float, nullable=False),
        sa.Column("critical", sa.Boolean, nullable=False),
        sa.Column("given_at", _TIME, nullable=False),
    )
    op.create_index("label_by_type", "label", ["type", "trace_key"])
    op.create_table(
        "verdict",
        sa.Column("key", _KEY, primary_key=True),
        sa.Column("trace_key", sa.BigInteger, nullable=False),
        sa.Column("given_at", _TIME, nullable=False),
        *(sa.Column(name, sa.String, nullable=False) for name in ("by", "why", "state")),
        sa.Column("reward", sa.Float),
        sa.Column("stamp", sa.String),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index("verdict_by_trace", "verdict", ["trace_key", "key"])
    op.create_table(
        "agreement",
        *(sa.Column(name, sa.String, primary_key=True) for name in ("project", "verifier", "version")),
        sa.Column("measured_at", _TIME, nullable=False),
        sa.Column("body", sa.JSON, nullable=False),
    )
