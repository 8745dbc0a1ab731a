"""A sample is one trainable row; a policy version names what was trained from which samples."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from agentloop.types.frozen import Frozen


class Sample(Frozen):
    """One trainable row; the four sequences have one entry per token."""

    episode_id: str
    group: str
    pool: str
    policy_version: int
    token_ids: tuple[int, ...]
    action_mask: tuple[int, ...]
    """1 where the policy sampled the token, 0 for prompt and tool output."""
    logprobs: tuple[float, ...]
    """Behaviour log-probability where the mask is 1, 0.0 elsewhere."""
    temperature: float
    reward: float
    advantage: float = 0.0


class PolicyState(StrEnum):
    """candidate -> live -> retired, candidate -> held -> retired; the table is in `registry/`."""

    candidate = "candidate"
    live = "live"
    held = "held"
    retired = "retired"


class PolicyVersion(Frozen):
    """A policy that can be named, compared and rolled back to. Numbers are never used twice."""

    number: int
    parent: int | None
    kind: str
    """`weights` when we hold them, `remote` for a policy that others serve, `scripted` for code."""
    artifact: str | None
    """Folder of the weights, relative to the project; None when we hold none."""
    sha256: str
    """Hash of the artifact, or of the policy's settings when there is none."""
    config_hash: str
    state: PolicyState = PolicyState.candidate
    note: str = ""
    """Where it came from, in a few words."""
    created_at: datetime
