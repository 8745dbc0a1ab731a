"""Can the rewards of Harbor tasks be believed? Their solutions, nobody, chance and every known cheat try for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from agentloop.harbor.agents import Cheater, Nobody, Oracle, Random
from agentloop.harbor.run import why
from agentloop.harbor.task import HarborTask
from agentloop.harbor.trial import Trial, TrialAgent, run_trial
from agentloop.judge.audit import N_ORACLE, RUN, Cheat, TaskAudit, known_cheats, refuse_no_box
from agentloop.protocols import SandboxBackend


def agents(n_oracle: int = N_ORACLE, cheats: Sequence[Cheat] | None = None) -> list[TrialAgent]:
    """Who tries each task, in this order; `cheats` in place of the known ones."""
    tried = known_cheats() if cheats is None else cheats
    return [*(Oracle() for _ in range(n_oracle)), Nobody(), Random(), *map(Cheater, tried)]


async def audit(
    tasks: Sequence[HarborTask],
    backend: SandboxBackend,
    *,
    trying: Sequence[TrialAgent],
    n_concurrent: int,
    on_done: Callable[[], None] = lambda: None,
) -> list[TaskAudit]:
    """What came of each task, in their order. Boxes are closed when it is cancelled.

    Raises CapabilityError for a backend without isolation.
    """
    refuse_no_box(backend)
    slots = asyncio.Semaphore(n_concurrent)

    async def one(task: HarborTask, agent: TrialAgent, n: int) -> Trial:
        async with slots:
            trial = await run_trial(task, agent, backend, run=RUN, n=n)
        on_done()
        return trial

    async with asyncio.TaskGroup() as group:
        running = [[group.create_task(one(task, agent, n)) for n, agent in enumerate(trying)] for task in tasks]
    audits = []
    for task, trials in zip(tasks, running, strict=True):
        found = TaskAudit(task.name)
        for agent, done in zip(trying, trials, strict=True):
            found.note(agent.name, done.result().verdict, why(done.result()))
        audits.append(found)
    return audits
