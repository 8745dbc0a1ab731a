"""Trials of many Harbor tasks, a few at a time, stored as they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentloop.config.layout import RUNS
from agentloop.costs.energy import Meter
from agentloop.errors import CapabilityError, counted
from agentloop.failures.learned.scorer import load_scorer
from agentloop.harbor.task import HarborTask, find_tasks
from agentloop.harbor.trial import DEFAULT, Terms, TrialAgent, run_trial
from agentloop.progress import Progress
from agentloop.protocols import SandboxBackend
from agentloop.sandbox import images
from agentloop.sandbox.docker import DockerBackend
from agentloop.sandbox.ladder import make_backend
from agentloop.store.place import run_store
from agentloop.store.store import Store
from agentloop.store.tables import StageRow
from agentloop.types import Attempt, RewardState

OR_ANOTHER = ", or use bubblewrap"
"""How the probe's reason ends, where bubblewrap is what was tried."""


def refuse_images(tasks: Sequence[HarborTask], backend: SandboxBackend) -> None:
    """Raises CapabilityError, before anything runs, when `backend` cannot make the boxes of some tasks.

    Only an engine builds Dockerfiles and has tags; the others take root folders and tars.
    """
    if backend.name == DockerBackend.name:
        return
    needing = [
        task.name for task in tasks if images.kind(task.image) in (images.ImageKind.recipe, images.ImageKind.tag)
    ]
    if not needing:
        return
    reason = DockerBackend().probe()
    docker = f"and {reason.removesuffix(OR_ANOTHER)}" if reason else "which works here: --sandbox docker"
    named = ", ".join(needing[:3]) + (f" and {len(needing) - 3} more" if len(needing) > 3 else "")
    raise CapabilityError(
        f"{counted(len(needing), 'task')} ({named}) cannot run in {backend.name}: an image from a Dockerfile or by tag "
        f"needs docker, {docker}; or name a root folder or a tar of one: [environment] docker_image"
    )


@dataclass(frozen=True)
class RunOptions:
    """Which tasks, where, and how often."""

    folders: Sequence[Path]
    """Task folders, or folders that hold them."""
    sandbox: str = "auto"
    out: Path = RUNS
    """Folder for the traces."""
    n_trials: int = 1
    """Of each task."""
    n_concurrent: int = 2
    canaries: bool = True


def run_folders(
    options: RunOptions,
    agent: Callable[[], TrialAgent],
    progress: Progress,
    note: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The document of `--json`. agent: made when the tasks are read. note: gets remarks on tasks."""
    tasks = find_tasks(list(options.folders))
    worker = agent()
    for task in tasks:
        for remark in task.remarks:
            note(remark)
    backend = make_backend(options.sandbox, "--sandbox")
    refuse_images(tasks, backend)
    scorer = load_scorer(Path())
    with run_store(options.out, Path()) as store:
        progress.start(f"run: {worker.name} on {counted(len(tasks), 'task')}", len(tasks) * options.n_trials)
        work = run_tasks(
            tasks,
            worker,
            backend,
            store,
            n_concurrent=options.n_concurrent,
            n_trials=options.n_trials,
            terms=Terms(guess=scorer.guess if scorer else None, canaries=options.canaries),
            on_done=lambda _: progress.advance(),
        )
        trials = asyncio.run(work)
    return document(trials, worker.name, backend.name, store.path or store.name)


async def run_tasks(
    tasks: Sequence[HarborTask],
    agent: TrialAgent,
    backend: SandboxBackend,
    store: Store,
    *,
    n_concurrent: int,
    n_trials: int = 1,
    terms: Terms = DEFAULT,
    on_done: Callable[[Attempt], None] = lambda _: None,
) -> list[Attempt]:
    """`n_trials` of each task, in their order, those of one task together. Each is on disk before `on_done` gets it.

    What the whole took is stored, too, with its energy where that is known.
    """
    run = f"{agent.name}-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"
    slots = asyncio.Semaphore(n_concurrent)

    async def one(place: int, task: HarborTask) -> Attempt:
        async with slots:
            attempt = await run_trial(task, agent, backend, run=run, n=place % n_trials, terms=terms)
        store.put_attempts(run, [attempt], first=place)
        on_done(attempt)
        return attempt

    started, started_cpu = time.perf_counter(), time.process_time()
    with Meter() as meter:
        async with asyncio.TaskGroup() as group:
            trials = [task for task in tasks for _ in range(n_trials)]
            running = [group.create_task(one(place, task)) for place, task in enumerate(trials)]
        done = [task.result() for task in running]
        store.put_stage(
            StageRow(
                name=run,
                n_episodes=len(done),
                n_tool_calls=sum(len(trial.trace.tool_calls) for trial in done),
                wall_s=time.perf_counter() - started,
                cpu_s=time.process_time() - started_cpu,
                metrics=meter.read().metrics,
            )
        )
    return done


def document(trials: Sequence[Attempt], agent: str, sandbox: str, store: Path | str) -> dict[str, Any]:
    """The one document of `--json`. `mean_reward` is the mean over tasks of each one's mean over its scored trials."""
    by_task: dict[str, list[Attempt]] = {}
    for trial in trials:
        by_task.setdefault(trial.task.id, []).append(trial)
    tasks = [_of_task(name, its) for name, its in by_task.items()]
    return {
        "agent": agent,
        "sandbox": sandbox,
        "n_tasks": len(tasks),
        "n_trials": len(trials),
        "n_scored": sum(trial.verdict.reward is not None for trial in trials),
        "mean_reward": _mean([task["mean_reward"] for task in tasks]),
        "tasks": tasks,
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


def _of_task(name: str, trials: Sequence[Attempt]) -> dict[str, Any]:
    rewards = [trial.verdict.reward for trial in trials]
    return {"task": name, "mean_reward": _mean(rewards), "rewards": rewards}


def _mean(values: Sequence[float | None]) -> float | None:
    """Of those that are known; None when none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def why(attempt: Attempt) -> str | None:
    """What stands in the way of a reward, or of the whole one; None when nothing is known to."""
    scores, error = attempt.verdict.scores, attempt.trace.error
    if attempt.verdict.state is not RewardState.scored:
        return error or "; ".join(score.error for score in scores if score.error) or "no reason was recorded"
    if attempt.verdict.reward == 1.0:
        return None
    if error or any(score.why for score in scores):
        return error or "; ".join(score.why for score in scores if score.why)
    last = attempt.trace.steps[-1].results[-1:] if attempt.trace.steps else ()
    if not last or last[0].ok:
        return None
    ended = "ran out of time" if last[0].timed_out else f"ended with exit code {last[0].exit_code}"
    words = last[0].content.strip().splitlines()
    return f"the last command {ended}{f': {words[-1]}' if words else ''}"
