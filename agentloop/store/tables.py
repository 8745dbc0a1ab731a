"""The storage form of the domain types: one row each, with columns only for what is searched or listed.

What is only shown lives in compressed bodies beside the columns (`bodies.py`). Whoever changes a table here raises
SCHEMA_VERSION and adds a file to `migrations/versions/`. Full text is in `body_text`, which each database makes its own
way (`fulltext.py`).
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, Column, Index, Integer, LargeBinary, UniqueConstraint, text
from sqlmodel import Field, SQLModel

from agentloop.types import StageKind

SCHEMA_VERSION = 8
"""Raised with every change of a table. An older file is upgraded when it is opened, an older server by
`agentloop store upgrade` alone; a newer one is refused."""

Key = BigInteger().with_variant(Integer, "sqlite")
"""64 bits; in SQLite the name has to be INTEGER for the column to be the row id itself."""
DEFAULT_PROJECT = "default"
"""The tenant of those who have only one, and of a loop whose settings name no other."""


class TraceSummary(SQLModel):
    """What is known of a trace without reading its bodies.

    One that was imported or sent as spans has None in the columns that speak of an episode, but for what it says of
    the episode, task and policy version that it belongs to.
    """

    key: int | None = Field(default=None, primary_key=True, sa_type=Key)
    """In the order in which traces were first stored."""
    project: str = DEFAULT_PROJECT
    id: str
    """Unique in its project."""
    source: str = "agentloop"
    """The format it came in; `otlp` for one that was sent as spans, `gateway` for calls that went through ours."""
    source_id: str | None = None
    name: str | None = None
    """Of the root span."""
    session: str | None = None
    agent: str | None = None
    model: str | None = None
    episode_id: str | None = None
    stage: str | None = None
    """Of a loop's, gate's or run's own attempts; None for all other traces."""
    superseded: str | None = None
    """The stage of which this was an attempt until another one at the same episode took its place."""
    n: int | None = None
    """Position within the stage: reading a stage in this order repeats the run's order."""
    task_id: str | None = Field(default=None, index=True)
    pool: str | None = None
    split: str | None = None
    purpose: str | None = None
    group: str | None = None
    policy_version: int | None = Field(default=None, index=True)
    seed: int | None = Field(default=None, sa_type=BigInteger)
    episode_state: str | None = None
    stop_reason: str | None = None
    reward_state: str = "unscored"
    reward: float | None = None
    failure: str | None = None
    """The critical failure's type; None for a success, and for what nobody classified."""
    n_steps: int = 0
    n_tool_calls: int = 0
    n_spans: int = 0
    n_errors: int = 0
    n_prompt_tokens: int = Field(default=0, sa_type=BigInteger)
    n_completion_tokens: int = Field(default=0, sa_type=BigInteger)
    cost_usd: float | None = None
    answer: str | None = None
    error: str | None = None
    started_at: datetime | None = None
    duration_s: float = 0.0
    stored_at: datetime
    """When something was last added to it."""


_LIVE = text("state = 'live'")
_CANARY = text("state = 'canary'")
_OURS = text("stage IS NOT NULL")
_LINKED = text("episode_id IS NOT NULL")
"""An episode of a loop has one trace; of others' traces several may say that they belong to one."""


class TraceRow(TraceSummary, table=True):
    """A trace. An episode's is written once with its verdict, so none exists without the other."""

    __tablename__ = "trace"
    __table_args__ = (
        UniqueConstraint("project", "id"),
        Index("trace_by_pool", "project", "pool", "split", "reward"),
        Index("trace_by_stage", "project", "stage", "n"),
        Index("trace_by_failure", "project", "failure", "key"),
        Index("trace_by_session", "project", "session", "key"),
        Index("trace_of_episode", "project", "episode_id", unique=True, sqlite_where=_OURS, postgresql_where=_OURS),
        Index("trace_by_episode", "project", "episode_id", sqlite_where=_LINKED, postgresql_where=_LINKED),
        Index("trace_by_project", "project", "key"),
        Index("trace_by_source", "source"),
        Index("trace_by_age", "stored_at"),
    )

    body: bytes | None = Field(default=None, sa_column=Column(LargeBinary))
    """An episode's Trace and Verdict, whole; of an imported trace the head; None where there are only spans."""
    bodies: bytes | None = Field(default=None, sa_column=Column(LargeBinary))
    """Of an imported trace: keys of the bodies that its head refers to."""


_IS_CALL = text("kind = 'chat'")
_ANSWERED = text("response_id IS NOT NULL")
"""Calls of models alone have a place in these indexes, by which spans are found that tell of one call (`calls.py`)."""


class SpanRow(SQLModel, table=True):
    """One OpenTelemetry span (`types.Span`)."""

    __tablename__ = "span"
    __table_args__ = (
        Index("span_by_time", "trace_key", "start_ns", "span_id"),
        Index("span_call_by_parent", "trace_key", "parent_id", sqlite_where=_IS_CALL, postgresql_where=_IS_CALL),
        Index("span_by_response", "trace_key", "response_id", sqlite_where=_ANSWERED, postgresql_where=_ANSWERED),
    )

    trace_key: int = Field(primary_key=True, sa_type=BigInteger)
    span_id: str = Field(primary_key=True)
    parent_id: str | None
    name: str
    kind: str
    start_ns: int = Field(sa_type=BigInteger)
    end_ns: int = Field(sa_type=BigInteger)
    error: str | None
    session: str | None
    agent: str | None
    model: str | None
    tool: str | None
    n_prompt_tokens: int = Field(sa_type=BigInteger)
    n_completion_tokens: int = Field(sa_type=BigInteger)
    cost_usd: float | None
    episode_id: str | None
    task_id: str | None
    policy_version: int | None
    reward: float | None
    response_id: str | None
    head: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    bodies: bytes = Field(sa_column=Column(LargeBinary, nullable=False))


class BodyRow(SQLModel, table=True):
    """A message, argument or result: whoever says it again refers to the same row."""

    __tablename__ = "body"

    key: int | None = Field(default=None, primary_key=True, sa_type=Key)
    hash: bytes = Field(sa_column=Column(LargeBinary, nullable=False, unique=True))
    """BLAKE2b of the content, keyed by the project: no tenant can tell what another one has."""
    data: bytes = Field(sa_column=Column(LargeBinary, nullable=False))


class TraceBodyRow(SQLModel, table=True):
    """Which traces a body is part of: for search, and to know when nobody needs it any more."""

    __tablename__ = "trace_body"
    __table_args__ = (Index("trace_body_by_body", "body_key", "trace_key"), {"sqlite_with_rowid": False})

    trace_key: int = Field(primary_key=True, sa_type=BigInteger)
    body_key: int = Field(primary_key=True, sa_type=BigInteger)


class FacetRow(SQLModel, table=True):
    """A tool, model or agent that occurs in a trace, each value once."""

    __tablename__ = "facet"
    __table_args__ = (Index("facet_by_value", "name", "value", "trace_key"), {"sqlite_with_rowid": False})

    trace_key: int = Field(primary_key=True, sa_type=BigInteger)
    name: str = Field(primary_key=True)
    value: str = Field(primary_key=True)


class ScoreRow(SQLModel, table=True):
    """One verifier's number on a trace, or why there is none. The last word of a source counts."""

    __tablename__ = "score"
    __table_args__ = (Index("score_by_verifier", "verifier", "value", "trace_key"),)

    trace_key: int = Field(primary_key=True, sa_type=BigInteger)
    verifier: str = Field(primary_key=True)
    source: str = Field(primary_key=True)
    """Who gave it: `judge` for our own verdicts, `import` for the source of a trace, or what a caller says."""
    version: str
    value: float | None
    error: str | None
    given_at: datetime


class LabelRow(SQLModel, table=True):
    """A `types.Failure` of a trace. The last word of a detector on a type and step counts."""

    __tablename__ = "label"
    __table_args__ = (Index("label_by_type", "type", "trace_key"),)

    trace_key: int = Field(primary_key=True, sa_type=BigInteger)
    detector: str = Field(primary_key=True)
    type: str = Field(primary_key=True)
    step: int = Field(primary_key=True)
    """-1 when the whole trace is meant."""
    evidence: str
    confidence: float
    critical: bool
    given_at: datetime


class VerdictRow(SQLModel, table=True):
    """What a trace was found to be worth at a time, and by whom; never changed, only followed by another."""

    __tablename__ = "verdict"
    __table_args__ = (Index("verdict_by_trace", "trace_key", "key"),)

    key: int | None = Field(default=None, primary_key=True, sa_type=Key)
    trace_key: int = Field(sa_type=BigInteger)
    given_at: datetime
    by: str
    """`judge`, `api`, or a person's name."""
    why: str
    state: str
    reward: float | None
    stamp: str | None
    """Hash of the task, its verifiers' versions and the taxonomy's: what is judged by the same is not judged again."""
    body: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    """The Verdict, with every score's version and each failure's detector."""


class AgreementRow(SQLModel, table=True):
    """How far a version of a verifier agreed with people when it was last measured (`judge/agreement.py`)."""

    __tablename__ = "agreement"

    project: str = Field(primary_key=True)
    verifier: str = Field(primary_key=True)
    version: str = Field(primary_key=True)
    measured_at: datetime
    body: dict[str, object] = Field(sa_column=Column(JSON, nullable=False))


class SettingRow(SQLModel, table=True):
    """What a store knows of itself: the key of its hashes."""

    __tablename__ = "setting"

    name: str = Field(primary_key=True)
    value: bytes = Field(sa_column=Column(LargeBinary, nullable=False))


class KeyRow(SQLModel, table=True):
    """A key of the trace service (`keys.py`)."""

    __tablename__ = "api_key"

    id: str = Field(primary_key=True)
    sha256: str
    project: str
    scopes: str
    """Separated by blanks."""
    made_at: datetime
    max_calls: int | None = Field(default=None, sa_type=BigInteger)
    """What it may spend at the gateway: this, and the next three; None is no bound."""
    max_tokens: int | None = Field(default=None, sa_type=BigInteger)
    max_usd: float | None = None
    max_calls_per_minute: int | None = Field(default=None, sa_type=BigInteger)
    n_calls: int = Field(default=0, sa_type=BigInteger)
    """What it has spent: this, and the next two."""
    n_tokens: int = Field(default=0, sa_type=BigInteger)
    cost_usd: float = 0.0


class PolicyRow(SQLModel, table=True):
    """A PolicyVersion. One is live, and one is a canary, in a project at most."""

    __tablename__ = "policy_version"
    __table_args__ = (
        Index("policy_live", "project", unique=True, sqlite_where=_LIVE, postgresql_where=_LIVE),
        Index("policy_canary", "project", unique=True, sqlite_where=_CANARY, postgresql_where=_CANARY),
    )

    project: str = Field(primary_key=True)
    number: int = Field(primary_key=True)
    parent: int | None
    kind: str
    artifact: str | None
    sha256: str
    parts: dict[str, str] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
    unhashed: list[str] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    config_hash: str
    lineage: dict[str, object] | None = Field(default=None, sa_column=Column(JSON))
    state: str
    note: str
    created_at: datetime


class MoveRow(SQLModel, table=True):
    """A Move of a version. Rows are added and never changed."""

    __tablename__ = "policy_move"
    __table_args__ = (Index("policy_move_by_version", "project", "version", "key"),)

    key: int | None = Field(default=None, primary_key=True, sa_type=Key)
    project: str
    version: int
    before: str | None
    after: str
    by: str
    why: str
    proof: dict[str, object] | None = Field(default=None, sa_column=Column(JSON))
    is_override: bool = False
    share: float | None = None
    is_shadow: bool = False
    at: datetime


class FeedbackRow(SQLModel, table=True):
    """A score or words on a trace, from outside (`feedback.py`). Rows are added and never changed."""

    __tablename__ = "feedback"
    __table_args__ = (Index("feedback_by_trace", "trace_key", "key"),)

    key: int | None = Field(default=None, primary_key=True, sa_type=Key)
    trace_key: int = Field(sa_type=BigInteger)
    source: str
    """The credential that sent it, or the evaluation that the trace's spans report."""
    by: str
    """The person or program that the sender names."""
    score: float | None
    text: str
    is_self_reported: bool
    """It comes from the credential that made the trace, or from the trace's own spans, and no setting trusts it."""
    given_at: datetime


class ProposalRow(SQLModel, table=True):
    """One call of a model that rewrites text for a trainer, so that the call is never paid for twice."""

    __tablename__ = "proposal"

    project: str = Field(primary_key=True)
    id: str = Field(primary_key=True)
    """Hash of the request, and its number among equal requests of one turn."""
    version: int
    """The version that is being made."""
    request: str
    answer: str
    cost_usd: float | None
    given_at: datetime


class FigureRow(SQLModel, table=True):
    """One figure of one step of training (`train/figures.py` has the names)."""

    __tablename__ = "figure"

    project: str = Field(primary_key=True)
    version: int = Field(primary_key=True)
    """The version that the step is a part of."""
    step: int = Field(primary_key=True)
    name: str = Field(primary_key=True)
    value: float | None
    """None where it was not a finite number."""
    at: datetime
    """When the step was recorded."""


class AuditRow(SQLModel, table=True):
    """An audit of a suite's verifiers before training (`loop/audited.py`)."""

    __tablename__ = "suite_audit"

    project: str = Field(primary_key=True)
    id: str = Field(primary_key=True)
    """Hash of the tasks and files that were audited, and of the cheats."""
    body: dict[str, object] = Field(sa_column=Column(JSON, nullable=False))
    at: datetime


class EvalRow(SQLModel, table=True):
    """An EvalReport: one policy version of a project on one state of a suite."""

    __tablename__ = "eval_report"

    project: str = Field(primary_key=True)
    suite_hash: str = Field(primary_key=True)
    policy_version: int = Field(primary_key=True)
    body: dict[str, object] = Field(sa_column=Column(JSON, nullable=False))


class DecisionRow(SQLModel, table=True):
    """A Decision on a candidate: there is one, and it is not taken twice."""

    __tablename__ = "decision"

    project: str = Field(primary_key=True)
    candidate: int = Field(primary_key=True)
    body: dict[str, object] = Field(sa_column=Column(JSON, nullable=False))


class StageRow(SQLModel, table=True):
    """A finished part of the loop. What has a row is not done again after an interruption."""

    __tablename__ = "stage"

    project: str = Field(default=DEFAULT_PROJECT, primary_key=True)
    name: str = Field(primary_key=True)
    position: int = 0
    """In the order in which stages finished; given by the store."""
    kind: str = StageKind.other
    version: int | None = None
    """The policy version that it made, or whose attempts it has; 0 for the control arm."""
    suite_hash: str | None = None
    """State of the suite, where the stage belongs to one state."""
    sandbox: str | None = None
    """Name of the backend."""
    n_episodes: int = 0
    n_tool_calls: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    dropped: dict[str, int] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
    """Why rows did not train -> how many."""
    metrics: dict[str, float] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))


def columns(table: type[SQLModel], *, without: tuple[str, ...] = ()) -> list[Any]:
    """The columns of `table`, to select them."""
    return [column for column in table.__table__.columns if column.name not in without]  # type: ignore[attr-defined]
