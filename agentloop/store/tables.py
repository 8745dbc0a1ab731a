"""The storage form of the domain types: one row each, with columns only for what is searched.

What is only shown lives in a compressed body beside the columns (`bodies.py`).
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import JSON, Column, Index, LargeBinary
from sqlmodel import Field, SQLModel

SCHEMA_VERSION = 1
"""Raised with every change of a table; a store of another version is refused, never guessed at."""


class TraceRow(SQLModel, table=True):
    """An episode with its trace and verdict: written once, together, so none exists without the others."""

    __tablename__ = "trace"
    __table_args__ = (Index("trace_by_pool", "pool", "split", "reward"), Index("trace_by_stage", "stage", "n"))

    id: str = Field(primary_key=True)
    episode_id: str = Field(unique=True)
    stage: str
    n: int
    """Position within the stage: reading a stage in this order repeats the run's order."""
    task_id: str = Field(index=True)
    pool: str
    split: str
    purpose: str
    group: str
    policy_version: int = Field(index=True)
    seed: int
    episode_state: str
    stop_reason: str
    reward_state: str
    reward: float | None
    failure: str | None = Field(index=True)
    """The critical failure's type; None for a success."""
    n_steps: int
    n_tool_calls: int
    answer: str | None
    error: str | None
    started_at: datetime
    duration_s: float
    body: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    """The Trace and the Verdict, whole."""


class PolicyRow(SQLModel, table=True):
    """A PolicyVersion."""

    __tablename__ = "policy_version"

    number: int = Field(primary_key=True)
    parent: int | None
    kind: str
    artifact: str | None
    sha256: str
    config_hash: str
    state: str
    note: str
    created_at: datetime


class EvalRow(SQLModel, table=True):
    """An EvalReport: one policy version on one state of a suite."""

    __tablename__ = "eval_report"

    suite_hash: str = Field(primary_key=True)
    policy_version: int = Field(primary_key=True)
    body: dict[str, object] = Field(sa_column=Column(JSON, nullable=False))


class DecisionRow(SQLModel, table=True):
    """A Decision on a candidate: there is one, and it is not taken twice."""

    __tablename__ = "decision"

    candidate: int = Field(primary_key=True)
    body: dict[str, object] = Field(sa_column=Column(JSON, nullable=False))


class StageRow(SQLModel, table=True):
    """A finished part of the loop. What has a row is not done again after an interruption."""

    __tablename__ = "stage"

    name: str = Field(primary_key=True)
    n_episodes: int = 0
    n_tool_calls: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    dropped: dict[str, int] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
    """Why rows did not train -> how many."""
    metrics: dict[str, float] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
