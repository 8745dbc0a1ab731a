"""One attempt at a Harbor task: the box, the agent's phase, the verification, the verdict.

The agent is done when its tests begin: every process of it is killed, and the tests run in a fresh box
that it never had. A shared verifier gets the agent's files there (`carry.py`), but the image's programs
as they were; a separate one (`environment_mode = "separate"`) declared artifacts alone. A reward that
is not one finite number is no reward: the verdict is `unscored`, never 0, and so is one that was
reached beside planted programs, or with test files that changed while they ran. An attempt that its agent
ended with an error, and tests that took too long on what it left, have the reward 0 (`faults.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from agentloop.abilities import WholeSandbox, runs_program, with_files
from agentloop.errors import CapabilityError, ConfigError, SandboxError
from agentloop.failures.detectors.rules import Rule
from agentloop.failures.detectors.tampering import changed_files
from agentloop.harbor.room import FOLDERS, ROOT, Room, must, words_as
from agentloop.harbor.task import HarborTask, Phase
from agentloop.harbor.verification import Outcome, verified
from agentloop.identity import Identity
from agentloop.judge.score import judge
from agentloop.protocols import Policy, Record, Sandbox, SandboxBackend
from agentloop.rollout.actors import UNNAMED, Actor
from agentloop.rollout.attempt import Crew, roll_out, with_n_lost
from agentloop.rollout.plan import stable_id
from agentloop.rollout.retry import is_lost, repeated
from agentloop.sandbox.pool import SandboxPool
from agentloop.types import (
    Attempt,
    AttemptPhase,
    Completion,
    Episode,
    Limits,
    Message,
    Purpose,
    RewardState,
    SandboxSpec,
    Step,
    StopReason,
    SubTrace,
    Task,
    ToolSpec,
    Trace,
    Verdict,
)

SPARE_S = 600.0
"""What a box may live beyond the agent's and the verifier's time."""


class TrialAgent(Protocol):
    """Who works on a Harbor task; see `agents.py`. It may have `files`, as `protocols.Agent` may."""

    name: str

    async def work(self, task: HarborTask, room: Room, record: Record) -> StopReason:
        """Act until an end; `record` gets what was done, step by step."""
        ...


@dataclass(frozen=True)
class Terms:
    """What the attempts of a run have in common."""

    version: int = 0
    """Of `Actor`."""
    identity: Identity = UNNAMED
    """Of `Actor`."""
    guess: Rule | None = None
    """Of `Crew`."""
    canaries: bool = True
    """Put canaries (`sandbox/canaries.py`) into the agent's sandbox, in a folder that no verifier sees."""
    pauses_s: Sequence[float] | None = None
    """Of `retry.repeated`."""


DEFAULT = Terms()


async def run_trial(
    task: HarborTask,
    agent: TrialAgent,
    backend: SandboxBackend,
    *,
    run: str,
    n: int = 0,
    terms: Terms = DEFAULT,
    on_lost: Callable[[Attempt], None] = lambda _: None,
    on_tests: Callable[[], None] = lambda: None,
) -> Attempt:
    """One attempt, repeated where infrastructure ended it.

    Raises only what ends the program, and what is wrong with the task's definition.
    on_lost: gets each attempt that was repeated. on_tests: called when a verification begins.
    """
    spec = sandbox_spec(task)
    own = with_files(spec, agent)
    digest = stable_id(run, task.name, agent.name, n)
    plain_task = Task(
        id=task.name, instruction=task.instruction, pool="harbor", sandbox=own, limits=Limits(max_steps=100)
    )
    episode = Episode(
        id=digest,
        task_id=task.name,
        group=f"{run}/{task.name}",
        purpose=Purpose.run,
        policy_version=terms.version,
        seed=int(digest[:12], 16),
    )

    async def once() -> Attempt:
        pool, worker = SandboxPool(backend, min_idle=0), _Worker(task, agent)
        outcome = Outcome(error="the tests were not run")

        async def prepare(_: Task, __: Episode, box: Sandbox) -> None:
            if not isinstance(box, WholeSandbox):
                raise SandboxError(f"boxes of {backend.name} take no files; use docker or bubblewrap")
            await _prepare(task, box)

        async def test(_: Task, __: Episode, box: Sandbox) -> None:
            nonlocal outcome
            on_tests()
            outcome = await verified(task, cast(WholeSandbox, box), backend, spec)

        actor = Actor(agent.name, worker, _NoPolicy(), terms.identity, version=terms.version)
        crew = Crew(actor, pool, terms.guess, terms.canaries, prepare, test, AttemptPhase.tests)
        try:
            rollout = await roll_out(plain_task, episode, crew)
        finally:
            await pool.close()
        verdict = await judge(plain_task, rollout.trace, [outcome], guess=terms.guess)
        if outcome.tampered:
            verdict = _labelled(rollout.trace, verdict, outcome.tampered)
        return Attempt(task=plain_task, episode=rollout.episode, trace=rollout.trace, verdict=verdict)

    *lost, attempt = await repeated(once, lambda one: is_lost(one.episode), terms.pauses_s)
    for one in lost:
        on_lost(one)
    return attempt.model_copy(update={"trace": with_n_lost(attempt.trace, len(lost))})


class _Worker:
    """An agent of Harbor tasks as a `protocols.Agent`: its last words are its answer."""

    def __init__(self, task: HarborTask, agent: TrialAgent) -> None:
        self._task, self._agent = task, agent
        self.name = agent.name
        self.program: bool = runs_program(agent)

    def first_messages(self, task: Task) -> tuple[Message, ...]:
        """See `protocols.Agent`."""
        return (Message(role="user", content=task.instruction),)

    async def run(
        self, task: Task, policy: Policy, sandbox: Sandbox, *, seed: int, record: Record
    ) -> tuple[StopReason, str | None]:
        """See `protocols.Agent`."""
        answer: str | None = None

        def note(part: Step | SubTrace) -> None:
            nonlocal answer
            answer = part.completion.message.content if isinstance(part, Step) else answer
            record(part)

        room = Room(cast(WholeSandbox, sandbox), self._task.agent, self._task.environment.env)
        stop = await self._agent.work(self._task, room, note)
        return stop, answer if stop is StopReason.submitted else None


class _NoPolicy:
    """A `TrialAgent` has its policy already."""

    name = "none"

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, max_tokens: int, seed: int
    ) -> Completion:
        """See `protocols.Policy`."""
        raise NotImplementedError("a Harbor agent asks the policy that it was made with")


def _labelled(trace: Trace, verdict: Verdict, changed: tuple[str, ...]) -> Verdict:
    """The verdict of an agent that changed its verifier's files: the cause, where that left no reward."""
    found, others = changed_files(trace, changed), verdict.failures
    if verdict.state is RewardState.unscored:  # the tests did their part: no grader has failed
        found = found.model_copy(update={"critical": True})
        others = tuple(f.model_copy(update={"critical": False}) for f in others if not f.type.is_infra)
    return verdict.model_copy(update={"failures": (found, *others)})


def sandbox_spec(task: HarborTask) -> SandboxSpec:
    """The agent's box."""
    environment = task.environment
    return SandboxSpec(
        image=task.image,
        root=True,
        workdir=environment.workdir,
        memory_mb=environment.memory_mb,
        cpus=environment.cpus,
        lifetime_s=task.agent.timeout_sec + task.verifier.timeout_sec + SPARE_S,
        allowed_hosts=task.hosts(task.agent),
    )


async def _prepare(task: HarborTask, box: WholeSandbox) -> None:
    await must(box, f"mkdir -p {FOLDERS} && chmod 777 {FOLDERS}")
    phases: dict[str, Phase] = {"agent": task.agent}
    if task.verifier.environment is None:  # another image has users of its own
        phases["verifier"] = task.verifier
    for name, phase in phases.items():
        if phase.user not in ROOT:
            done = await box.exec(f"{words_as(phase.user)} true", timeout_s=30.0, lease="")
            if done.exit_code:
                said = " ".join((done.stderr or done.stdout).split())[:200]
                where = f"{task.folder}/task.toml: [{name}] user {phase.user!r}"
                if "not permitted" in said:
                    raise CapabilityError(f"{where}: this box has one user alone ({said}); use docker, or leave it out")
                raise ConfigError(f"{where} is none of the image's ({said}); correct it, or add one in the Dockerfile")
    check = task.environment.healthcheck
    if check is None:
        return
    for _ in range(check.retries + 1):
        if not (done := await box.exec(check.command, timeout_s=check.timeout_sec, lease="")).exit_code:
            return
        await asyncio.sleep(check.interval_sec)
    raise SandboxError(f"the healthcheck of {task.name} fails ({done.exit_code}): {done.stderr or done.stdout}"[:500])
