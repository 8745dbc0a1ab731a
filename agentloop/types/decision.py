"""An evaluation report holds the outcomes of one version; a decision promotes, holds or rolls it back."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import Field

from agentloop.types.frozen import Frozen


class EvalReport(Frozen):
    """One policy version on one suite split: every scored reward, by task."""

    suite: str
    suite_hash: str
    policy_version: int
    rewards: dict[str, tuple[float, ...]]
    """Task id -> one reward per scored episode; infrastructure failures are not in it."""
    n_infra: int = 0
    """Episodes without a reward."""
    n_lost: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    """Task id -> attempts that infrastructure lost: one number for each reward of the task, then one for each episode
    that has no reward and lost an attempt. A task that lost none is not in it; nor is any in older reports."""
    failures: dict[str, int] = Field(default_factory=dict)
    """Critical failure type -> number of episodes."""


class Action(StrEnum):
    """What becomes of a candidate."""

    promote = "promote"
    hold = "hold"
    roll_back = "roll_back"


class Decision(Frozen):
    """The gate's word on a candidate, with what it rests on."""

    action: Action
    baseline: int
    candidate: int
    n_tasks: int
    difference: float
    """Mean over tasks of candidate minus baseline reward."""
    ci95: tuple[float, float]
    p_better: float
    """One-sided p-value of "not better"."""
    p_worse: float
    """One-sided p-value of "not worse"."""
    reasons: tuple[str, ...]
    created_at: datetime
