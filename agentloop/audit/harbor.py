"""Can the rewards of Harbor tasks be believed? Their solutions, nobody, chance and every known cheat try for them."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from agentloop.audit.cheats import (
    N_ORACLE,
    RUN,
    Cheat,
    TaskAudit,
    infrastructure,
    known_cheats,
    patience_s,
    refuse_no_box,
    start_one_of_each,
)
from agentloop.harbor.agents import Nobody, Oracle, Random, named_paths, run_step
from agentloop.harbor.room import Room
from agentloop.harbor.run import why
from agentloop.harbor.task import HarborTask
from agentloop.harbor.trial import Terms, TrialAgent, run_trial, sandbox_spec
from agentloop.protocols import Record, SandboxBackend
from agentloop.rollout.actors import NOBODY, ORACLE, RANDOM
from agentloop.rollout.retry import ONCE
from agentloop.types import Attempt, StopReason

T = TypeVar("T")
TERMS = Terms(pauses_s=ONCE)
HONEST = (ORACLE, NOBODY, RANDOM)
"""Agents whose attempts have no time bound, and set that of the cheats."""

CHEAT_S = 5.0
"""A cheat that takes longer is judged by what it left."""


class Cheater:
    """Tries one cheat and does nothing else."""

    def __init__(self, cheat: Cheat) -> None:
        self.name, self._cheat = cheat.name, cheat

    async def work(self, task: HarborTask, room: Room, record: Record) -> StopReason:
        """See `trial.TrialAgent`."""
        run = self._cheat.run
        variables = f"PATHS={shlex.quote(' '.join(named_paths(task)))}; WORK=$(pwd); "
        record(await run_step(room, variables + run, run, said=self._cheat.tries, timeout_s=CHEAT_S))
        return StopReason.submitted


@dataclass(frozen=True)
class TimedAttempt:
    """One agent's attempt at a task, within its time or not."""

    agent: str
    attempt: Attempt | None
    """None for an attempt that was cut off."""
    took_s: float
    """Seconds, verification included."""
    reached_tests: bool
    """Whether its verification began."""


def agents(n_oracle: int = N_ORACLE, cheats: Sequence[Cheat] | None = None) -> list[TrialAgent]:
    """Who tries each task, in this order; `cheats` in place of the known ones."""
    tried = known_cheats() if cheats is None else cheats
    return [*(Oracle() for _ in range(n_oracle)), Nobody(), Random(), *map(Cheater, tried)]


def quick_agents() -> list[TrialAgent]:
    """Who tries each task in a quick check."""
    return [Oracle(), Nobody()]


async def audit(
    tasks: Sequence[HarborTask],
    backend: SandboxBackend,
    *,
    trying: Sequence[TrialAgent],
    n_concurrent: int,
    on_start: Callable[[str], None] = lambda _: None,
    on_done: Callable[[], None] = lambda: None,
) -> list[TaskAudit]:
    """What came of each task, in their order. Sandboxes are closed when it is cancelled.

    on_start: gets `TASK: AGENT` when an attempt begins. Raises CapabilityError for a backend without
    isolation, and SandboxError when no sandbox starts for a task.
    """
    refuse_no_box(backend)
    await start_one_of_each(backend, [(task.name, sandbox_spec(task)) for task in tasks])
    slots = asyncio.Semaphore(n_concurrent)

    async def attempt(task: HarborTask, agent: TrialAgent, n: int, limit_s: float | None = None) -> TimedAttempt:
        done, reached = None, asyncio.Event()
        async with slots:
            on_start(f"{task.name}: {agent.name}")
            began = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    done = await run_trial(task, agent, backend, run=RUN, n=n, terms=TERMS, on_tests=reached.set)
            on_done()
        return TimedAttempt(agent.name, done, time.monotonic() - began, reached.is_set())

    async def one(task: HarborTask) -> TaskAudit:
        result = TaskAudit(task.name)
        numbered = list(enumerate(trying))
        honest = await _all(attempt(task, agent, n) for n, agent in numbered if agent.name in HONEST)
        limit_s = patience_s([tried.took_s for tried in honest])
        cheats = await _all(attempt(task, agent, n, limit_s) for n, agent in numbered if agent.name not in HONEST)
        for tried in [*honest, *cheats]:
            if tried.attempt is None:
                result.cut(tried.agent, limit_s, reached_tests=tried.reached_tests)
            else:
                ours = infrastructure(tried.attempt.verdict, tried.attempt.trace.error)
                result.note(tried.agent, tried.attempt.verdict, why(tried.attempt), infrastructure=ours)
        return result

    return await _all(one(task) for task in tasks)


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; when one raises, the others are cancelled and the first error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one) for one in work]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [done.result() for done in running]
