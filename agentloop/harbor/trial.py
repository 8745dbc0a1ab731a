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
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

from agentloop.abilities import WholeSandbox, runs_program, with_files
from agentloop.errors import CapabilityError, ConfigError, SandboxError
from agentloop.failures.detectors.tampering import changed_files
from agentloop.faults import event_of, words_of
from agentloop.harbor.room import FOLDERS, ROOT, Room, must, words_as
from agentloop.harbor.task import HarborTask, Phase
from agentloop.harbor.verification import Outcome, verified
from agentloop.judge.score import judge
from agentloop.protocols import Record, Sandbox, SandboxBackend
from agentloop.rollout.episode import is_overdue, stable_id, state_after
from agentloop.sandbox.canaries import plant
from agentloop.types import (
    Attempt,
    AttemptPhase,
    Break,
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


async def run_trial(
    task: HarborTask,
    agent: TrialAgent,
    backend: SandboxBackend,
    *,
    run: str,
    n: int = 0,
    planted: bool = True,
    on_tests: Callable[[], None] = lambda: None,
) -> Attempt:
    """One attempt. Raises only what ends the program, and what is wrong with the task's definition.

    planted: put canaries (`sandbox/canaries.py`) into the agent's box, in a folder that no verifier sees.
    on_tests: called when the verification begins.
    """
    spec = sandbox_spec(task)
    own = with_files(spec, agent)
    digest = stable_id(run, task.name, agent.name, n)
    recorded: list[Step | SubTrace] = []
    started_at, started = datetime.now(UTC), time.perf_counter()
    stop, outcome = StopReason.error, Outcome(error="the tests were not run")
    problem: str | None = None
    broke: Break | None = None
    phase, created = AttemptPhase.sandbox, math.inf
    box: Sandbox | None = None
    try:
        box = await backend.create(own)
        created = time.perf_counter()
        if not isinstance(box, WholeSandbox):
            raise SandboxError(f"boxes of {backend.name} take no files; use docker or bubblewrap")
        await _prepare(task, box)
        if planted:
            await plant(box, digest)
        room = Room(box, task.agent, task.environment.env)
        phase = AttemptPhase.agent
        stop = await agent.work(task, room, recorded.append)
        phase = AttemptPhase.tests
        on_tests()
        outcome = await verified(task, box, backend, spec)
    # The episode recorder: whatever an agent or a sandbox raises becomes part of the trace.
    except (Exception, SystemExit) as error:
        if phase is AttemptPhase.tests and isinstance(error, ConfigError):
            phase = AttemptPhase.sandbox  # the tests' sandbox cannot be made ready: the task's mistake, never a 0
        overdue = is_overdue(own, time.perf_counter() - created)
        problem, broke = words_of(error), event_of(error, phase, overdue=overdue)
    finally:
        if box is not None:
            await box.close()
    steps = [one for one in recorded if isinstance(one, Step)]
    episode = Episode(
        id=digest,
        task_id=task.name,
        group=f"{run}/{task.name}",
        purpose=Purpose.run,
        policy_version=0,
        seed=int(digest[:12], 16),
        state=state_after(broke),
    )
    trace = Trace(
        id=stable_id("trace", digest),
        episode_id=digest,
        task_id=task.name,
        policy_version=0,
        isolation=backend.isolation,
        messages=(Message(role="user", content=task.instruction),),
        steps=tuple(steps),
        children=tuple(one for one in recorded if isinstance(one, SubTrace)),
        answer=steps[-1].completion.message.content if steps and stop is StopReason.submitted else None,
        stop_reason=stop if problem is None else StopReason.error,
        error=problem,
        broke=broke,
        program=runs_program(agent),
        started_at=started_at,
        duration_s=time.perf_counter() - started,
    )
    known = Task(id=task.name, instruction=task.instruction, pool="harbor", sandbox=own, limits=Limits(max_steps=100))
    verdict = await judge(known, trace, [outcome])
    if outcome.tampered:
        verdict = _labelled(trace, verdict, outcome.tampered)
    return Attempt(task=known, episode=episode, trace=trace, verdict=verdict)


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
