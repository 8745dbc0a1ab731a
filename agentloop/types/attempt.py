"""Attempt: one rollout of a task with everything that is known of it."""

from __future__ import annotations

from agentloop.types.episode import Episode
from agentloop.types.frozen import Frozen
from agentloop.types.task import Task
from agentloop.types.trace import Trace
from agentloop.types.verdict import Verdict


class Attempt(Frozen):
    """One rollout of a task with its verdict: the unit that is rolled out, stored, trained on and compared."""

    task: Task
    episode: Episode
    trace: Trace
    verdict: Verdict
