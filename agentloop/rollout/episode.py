"""Run one episode, and run many of them together.

An episode always leaves its trace, also where an error ends it. `faults.py` says whose fault that was: an episode
that the infrastructure ended is `infra_failed`, which is retried and never scored; one that the agent ended is
`finished`, and is judged. Judging, storing and training are not done here.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime

from agentloop.abilities import is_on_host, runs_program, with_files
from agentloop.errors import ConfigError, PolicyError, SandboxError
from agentloop.faults import event_of, fault_in, fault_of, words_of
from agentloop.policies.lockstep import BatchPolicy, Lockstep
from agentloop.protocols import Agent, Policy, Pool, Sandbox
from agentloop.sandbox.absent import AbsentSandbox
from agentloop.types import (
    AttemptPhase,
    Break,
    Episode,
    EpisodeState,
    FailureType,
    Purpose,
    SandboxSpec,
    Step,
    StopReason,
    SubTrace,
    Task,
    Trace,
)

MAX_RETRIES = 2
"""Further attempts at an episode that was lost to infrastructure."""
NEARLY = 0.9
"""Share of a sandbox's lifetime after which its end counts as that of its lifetime: it began before the lease did."""
MAX_INFRA_SHARE = 0.5
"""A cohort of which more than this failed for our reasons says nothing about the policy."""

MISTAKES = ("ConfigError", "PluginError")
"""Errors by which settings end an attempt, which the user can mend."""
REFUSALS = (401, 403, 404)
"""HTTP statuses with which an endpoint refuses a wrong API key, model name or URL."""
CORRECT = "correct the API key, the model name or the URL of the policy, then run the same command again"
"""The next move where an endpoint refuses most attempts like this."""

NO_ISOLATION = "none"
"""Of what is done in an environment, which runs on the host."""


@dataclass(frozen=True)
class Rollout:
    """One planned episode of a task, and what became of it."""

    task: Task
    episode: Episode
    trace: Trace


@dataclass(frozen=True)
class Crew:
    """Who rolls out: the agent, the policy it asks, and the boxes it acts in."""

    agent: Agent
    policy: Policy | BatchPolicy
    pool: Pool
    max_concurrent: int = 8
    """Episodes at once, for a policy that does not answer in batches."""
    on_start: Callable[[Task, Episode, Sandbox], Awaitable[None]] | None = None
    """Gets a box ready, before the agent has it."""
    on_end: Callable[[Task, Episode, Sandbox], Awaitable[None]] | None = None
    """Looks at the box of an episode that ended by itself, before it is discarded."""


def stable_id(*parts: object) -> str:
    """32 hex digits that depend on `parts` alone: the same episode has the same id each time it is run."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def plan(
    tasks: Sequence[Task], *, run: str, stage: str, purpose: Purpose, policy_version: int, group_size: int = 1
) -> list[tuple[Task, Episode]]:
    """`group_size` episodes of each entry of `tasks`, with ids and seeds that follow from the arguments."""
    planned: list[tuple[Task, Episode]] = []
    for position, task in enumerate(tasks):
        group = f"{stage}/{position}/{task.id}"
        for k in range(group_size):
            digest = stable_id(run, group, k)
            episode = Episode(
                id=digest,
                task_id=task.id,
                group=group,
                purpose=purpose,
                policy_version=policy_version,
                seed=int(digest[:12], 16),
            )
            planned.append((task, episode))
    return planned


async def run_episode(
    task: Task,
    episode: Episode,
    *,
    agent: Agent,
    policy: Policy,
    pool: Pool,
    on_start: Callable[[Task, Episode, Sandbox], Awaitable[None]] | None = None,
    on_end: Callable[[Task, Episode, Sandbox], Awaitable[None]] | None = None,
) -> Rollout:
    """One attempt at `task`. Raises only what ends the program (cancellation, interrupts)."""
    recorded: list[Step | SubTrace] = []
    started_at, started = datetime.now(UTC), time.perf_counter()
    stop, answer = StopReason.error, None
    problem: str | None = None
    broke: Break | None = None
    phase, leased = AttemptPhase.sandbox, math.inf
    try:
        async with _leased(task, episode, agent, pool) as sandbox:
            leased = time.perf_counter()
            if on_start is not None and not is_on_host(agent):
                await on_start(task, episode, sandbox)
            phase = AttemptPhase.agent
            stop, answer = await agent.run(task, policy, sandbox, seed=episode.seed, record=recorded.append)
            phase = AttemptPhase.artifacts
            if on_end is not None:
                await on_end(task, episode, sandbox)
    # The episode recorder: whatever an agent, a policy or a sandbox raises becomes part of the trace.
    except (Exception, SystemExit) as error:
        overdue = is_overdue(task.sandbox, time.perf_counter() - leased)
        problem = words_of(error)
        broke = event_of(error, phase, overdue=overdue, shared=task.sandbox.read_only)
    trace = Trace(
        id=stable_id("trace", episode.id),
        episode_id=episode.id,
        task_id=task.id,
        policy_version=episode.policy_version,
        isolation=pool.isolation if task.environment is None and not is_on_host(agent) else NO_ISOLATION,
        messages=agent.first_messages(task),
        steps=tuple(one for one in recorded if isinstance(one, Step)),
        children=tuple(one for one in recorded if isinstance(one, SubTrace)),
        answer=answer if problem is None else None,
        stop_reason=stop if problem is None else StopReason.error,
        error=problem,
        broke=broke,
        program=runs_program(agent),
        answers_readable=is_on_host(agent),
        started_at=started_at,
        duration_s=time.perf_counter() - started,
    )
    state = state_after(broke)
    return Rollout(task, episode.model_copy(update={"state": state}), trace)


def _leased(task: Task, episode: Episode, agent: Agent, pool: Pool) -> AbstractAsyncContextManager[Sandbox]:
    """The sandbox of one attempt; of an agent that acts on this machine one in which nothing runs."""
    if is_on_host(agent):
        return nullcontext(AbsentSandbox())
    return pool.lease(with_files(task.sandbox, agent), episode.id)


def state_after(broke: Break | None) -> EpisodeState:
    """The state of an attempt that `broke` ended, or that nothing ended but itself."""
    return EpisodeState.infra_failed if broke is not None and fault_of(broke).ours else EpisodeState.finished


def is_overdue(spec: SandboxSpec, used_s: float) -> bool:
    """True where a sandbox that ended after `used_s` seconds was at the end of its lifetime."""
    return spec.lifetime_s is not None and used_s >= NEARLY * spec.lifetime_s


async def roll_out(
    planned: Sequence[tuple[Task, Episode]], crew: Crew, on_done: Callable[[Rollout], None] = lambda _: None
) -> list[Rollout]:
    """Run the planned episodes together; results in the order of the plan, whatever finished first.

    Episodes that were lost to infrastructure are tried again up to MAX_RETRIES times; the last attempt is what comes
    back. An episode that its agent ended is not. `on_done` gets every attempt.
    """
    results: dict[str, Rollout] = {}
    todo = list(planned)
    for _ in range(1 + MAX_RETRIES):
        for rollout in await _cohort(todo, crew, on_done):
            results[rollout.episode.id] = rollout
        todo = [(task, e) for task, e in todo if results[e.id].episode.state is EpisodeState.infra_failed]
        if not todo:
            break
    return [results[episode.id] for _, episode in planned]


def refuse_broken(rollouts: Sequence[Rollout]) -> None:
    """Raise where the rollouts say nothing about the policy.

    Raises PolicyError or SandboxError with the first failure when more than MAX_INFRA_SHARE of them were lost to
    infrastructure, and ConfigError when a mistake in the settings ended so many (`is_mistaken`).
    """
    broken = [r for r in rollouts if r.episode.state is EpisodeState.infra_failed]
    mistaken = [r for r in rollouts if is_mistaken(r.trace)]
    most = MAX_INFRA_SHARE * len(rollouts)
    again = "mend that, then run the same command again"
    if len(broken) > most:
        fault, problem = fault_in(broken[0].trace), broken[0].trace.error or "no reason was recorded"
        unreachable = fault is not None and fault.type is FailureType.infra_model_api_error
        kind = PolicyError if unreachable else SandboxError
        raise kind(f"{len(broken)} of {len(rollouts)} episodes failed outside the agent: {problem}; {again}")
    if len(mistaken) > most:
        first, many = mistaken[0].trace, f"{len(mistaken)} of {len(rollouts)} episodes"
        problem = (first.error or "").partition(": ")[2]
        if is_refused(first):
            raise ConfigError(f"the model's endpoint refused the first request of {many}: {problem}; {CORRECT}")
        raise ConfigError(f"{many} ended with a mistake: {problem}; {again}")


def is_mistaken(trace: Trace) -> bool:
    """True where a mistake in the settings may have ended the attempt: ConfigError, or `is_refused`."""
    return is_refused(trace) or (trace.broke is not None and trace.broke.error in MISTAKES)


def is_refused(trace: Trace) -> bool:
    """True where the model's endpoint refused the first request of the attempt with one of REFUSALS.

    One such attempt is the agent's outcome: the endpoint may refuse the words of one task. Where most attempts end
    like this, the API key, the model name or the URL is wrong.
    """
    broke = trace.broke
    at_once = not trace.steps and not trace.children
    return at_once and broke is not None and broke.error == "ModelRefused" and broke.status in REFUSALS


async def _cohort(
    planned: Sequence[tuple[Task, Episode]], crew: Crew, on_done: Callable[[Rollout], None]
) -> list[Rollout]:
    """One attempt at each episode.

    A batched policy answers when every seat has asked, so no more episodes sit down at once than
    can have a box: one that waited for a box would keep those that hold the boxes waiting.
    """
    if not isinstance(crew.policy, BatchPolicy):
        return await _together(planned, crew, None, on_done)
    share = all(task.sandbox.read_only for task, _ in planned)
    size = max(1, len(planned)) if share else crew.pool.max_boxes
    waves = [planned[start : start + size] for start in range(0, len(planned), size)]
    return [r for wave in waves for r in await _together(wave, crew, Lockstep(crew.policy, len(wave)), on_done)]


async def _together(
    planned: Sequence[tuple[Task, Episode]], crew: Crew, lockstep: Lockstep | None, on_done: Callable[[Rollout], None]
) -> list[Rollout]:
    slots = asyncio.Semaphore(len(planned) if lockstep else crew.max_concurrent)

    async def one(index: int, task: Task, episode: Episode) -> Rollout:
        async with slots, _seat(crew.policy, lockstep, index) as policy:
            rollout = await run_episode(
                task,
                episode,
                agent=crew.agent,
                policy=policy,
                pool=crew.pool,
                on_start=crew.on_start,
                on_end=crew.on_end,
            )
        on_done(rollout)
        return rollout

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(i, task, episode)) for i, (task, episode) in enumerate(planned)]
    return [task.result() for task in running]


@asynccontextmanager
async def _seat(policy: Policy | BatchPolicy, lockstep: Lockstep | None, index: int) -> AsyncIterator[Policy]:
    """What episode number `index` asks: its seat at a batched policy, or the policy itself."""
    if lockstep is None:
        assert not isinstance(policy, BatchPolicy), "a batched policy is shared through seats"  # noqa: S101
        yield policy
        return
    seat = lockstep.seat(index)
    try:
        yield seat
    finally:
        seat.leave()
