"""Trials of many Harbor tasks, a few at a time, stored as they end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentloop.harbor.task import HarborTask
from agentloop.harbor.trial import Trial, TrialAgent, run_trial
from agentloop.protocols import SandboxBackend
from agentloop.store.store import Store
from agentloop.types import RewardState

STORE = Path("traces") / "store.db"


async def run_tasks(
    tasks: Sequence[HarborTask],
    agent: TrialAgent,
    backend: SandboxBackend,
    store: Store,
    *,
    n_concurrent: int,
    on_done: Callable[[Trial], None] = lambda _: None,
) -> list[Trial]:
    """One trial of each task, in their order. Each is on disk before `on_done` gets it."""
    run = f"{agent.name}-{datetime.now(UTC):%Y%m%dT%H%M%S}"
    slots = asyncio.Semaphore(n_concurrent)

    async def one(n: int, task: HarborTask) -> Trial:
        async with slots:
            trial = await run_trial(task, agent, backend, run=run)
        store.put_judged(run, [(trial.task, trial.episode, trial.trace, trial.verdict)], first=n)
        on_done(trial)
        return trial

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(n, task)) for n, task in enumerate(tasks)]
    return [task.result() for task in running]


def document(trials: Sequence[Trial], agent: str, sandbox: str, store: Path) -> dict[str, Any]:
    """The one document of `--json`."""
    scored = [trial.verdict.reward for trial in trials if trial.verdict.reward is not None]
    return {
        "agent": agent,
        "sandbox": sandbox,
        "n_tasks": len(trials),
        "n_scored": len(scored),
        "mean_reward": sum(scored) / len(scored) if scored else None,
        "trials": [
            {
                "task": trial.task.id,
                "reward": trial.verdict.reward,
                "state": trial.verdict.state.value,
                "why": why(trial),
                "duration_s": round(trial.trace.duration_s, 1),
                "trace": trial.trace.id,
            }
            for trial in trials
        ],
        "store": str(store),
    }


def why(trial: Trial) -> str | None:
    """What stands in the way of a reward; None for a scored trial."""
    if trial.verdict.state is RewardState.scored:
        return None
    told = [score.error for score in trial.verdict.scores if score.error]
    return trial.trace.error or "; ".join(told) or "no reason was recorded"
