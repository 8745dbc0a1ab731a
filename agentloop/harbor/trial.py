"""One attempt at a Harbor task: the box, the agent's phase, the verification, the verdict.

The agent is done when its tests begin: every process of it is killed, and where tests and rewards lie
is made anew. In a shared box the agent was root, so what it did to the box's programs stays; a
separate verifier (`environment_mode = "separate"`) sees nothing of it but declared artifacts. A
reward that is not one finite number is no reward: the verdict is `unscored`, never 0.
"""

from __future__ import annotations

import asyncio
import json
import math
import shlex
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from agentloop.config import from_environment
from agentloop.episode import stable_id
from agentloop.errors import CapabilityError, ConfigError, PathError, SandboxError, TransferLimit
from agentloop.harbor.task import Collect, HarborTask, Phase, VerifierMode
from agentloop.judge.score import judge
from agentloop.protocols import Sandbox, SandboxBackend
from agentloop.sandbox.box import Box
from agentloop.types import (
    Episode,
    EpisodeState,
    ExecResult,
    Limits,
    Message,
    Purpose,
    SandboxSpec,
    Step,
    StopReason,
    Task,
    Trace,
    Verdict,
)

TESTS, LOGS, SOLUTION = "/tests", "/logs/verifier", "/solution"
FOLDERS = "/logs/agent /logs/verifier /logs/artifacts"
COLLECTED = "/logs/artifacts"
MAX_REWARD_BYTES = 65_536
MAX_OUTPUT = 65_536
MAX_SAID = 400
"""Bytes of what the tests printed last that go into a message."""
SPARE_S = 600.0
"""What a box may live beyond the agent's and the verifier's time."""


@dataclass(frozen=True)
class Trial:
    """A finished attempt, as the store takes it."""

    task: Task
    episode: Episode
    trace: Trace
    verdict: Verdict


class TrialAgent(Protocol):
    """Who works on a Harbor task; see `agents.py`."""

    name: str

    async def work(self, task: HarborTask, room: Room, steps: list[Step]) -> StopReason:
        """Act until an end, adding what was done to `steps`."""
        ...


class Room:
    """A task's box as one phase sees it: its user, its variables, its time."""

    def __init__(self, box: Box, phase: Phase, env: Mapping[str, str]) -> None:
        self.box, self.id, self.isolation = box, box.id, box.isolation
        self._user, self._env = phase.user, {**env, **phase.env}
        self.ends_at = time.monotonic() + phase.timeout_sec

    async def exec(self, command: str, *, timeout_s: float = math.inf, max_output: int = MAX_OUTPUT) -> ExecResult:
        """See `protocols.Sandbox`; the phase's time is the limit."""
        left = max(0.01, min(timeout_s, self.ends_at - time.monotonic()))
        variables = "".join(f"export {k}={shlex.quote(from_environment(v))}; " for k, v in self._env.items())
        if self._user not in (None, "root", 0, "0"):
            command = f"exec {_as(self._user)} {shlex.quote(variables + command)}"
        return await self.box.exec(variables + command, timeout_s=left, max_output=max_output, lease="")

    async def close(self) -> None:
        """The box is the trial's to close."""


async def run_trial(task: HarborTask, agent: TrialAgent, backend: SandboxBackend, *, run: str, n: int = 0) -> Trial:
    """One attempt. Raises only what ends the program: an episode that fails still leaves its trace."""
    spec = _spec(task)
    digest = stable_id(run, task.name, agent.name, n)
    steps: list[Step] = []
    started_at, started = datetime.now(UTC), time.perf_counter()
    stop, problem, outcome = StopReason.error, None, Outcome(error="the tests were not run")
    box: Sandbox | None = None
    try:
        box = await backend.create(spec)
        if not isinstance(box, Box):
            raise SandboxError(f"boxes of {backend.name} take no files; use docker or bubblewrap")
        await _prepare(task, box)
        stop = await agent.work(task, Room(box, task.agent, task.environment.env), steps)
        outcome = await _verified(task, box, backend, spec)
    # The episode recorder: whatever an agent or a box raises becomes part of the trace.
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    finally:
        if box is not None:
            await box.close()
    episode = Episode(
        id=digest,
        task_id=task.name,
        group=f"{run}/{task.name}",
        purpose=Purpose.run,
        policy_version=0,
        seed=int(digest[:12], 16),
        state=EpisodeState.finished if problem is None else EpisodeState.infra_failed,
    )
    trace = Trace(
        id=stable_id("trace", digest),
        episode_id=digest,
        task_id=task.name,
        policy_version=0,
        isolation=backend.isolation,
        messages=(Message(role="user", content=task.instruction),),
        steps=tuple(steps),
        answer=steps[-1].completion.message.content if steps and stop is StopReason.submitted else None,
        stop_reason=stop if problem is None else StopReason.error,
        error=problem,
        started_at=started_at,
        duration_s=time.perf_counter() - started,
    )
    known = Task(id=task.name, instruction=task.instruction, pool="harbor", sandbox=spec, limits=Limits(max_steps=100))
    return Trial(known, episode, trace, await judge(known, trace, [outcome]))


@dataclass
class Outcome:
    """What the tests said, as a verifier: one number, or why there is none."""

    value: float | None = None
    error: str = ""
    name: str = "test.sh"
    version: str = "1"

    async def score(self, trace: Trace, sandbox: Sandbox | None) -> float:
        """The reward. Raises ValueError with the reason when there is none."""
        if self.value is None:
            raise ValueError(self.error)
        return self.value


def _spec(task: HarborTask, phase: Phase | None = None) -> SandboxSpec:
    environment = task.environment
    phase = phase or task.agent
    return SandboxSpec(
        image=task.image,
        root=True,
        workdir=environment.workdir,
        memory_mb=environment.memory_mb,
        cpus=environment.cpus,
        lifetime_s=task.agent.timeout_sec + task.verifier.timeout_sec + SPARE_S,
        allowed_hosts=task.hosts(phase),
    )


async def _prepare(task: HarborTask, box: Box) -> None:
    await _must(box, f"mkdir -p {FOLDERS} && chmod 777 {FOLDERS}")
    phases: dict[str, Phase] = {"agent": task.agent}
    if task.verifier.environment is None:  # another image has users of its own
        phases["verifier"] = task.verifier
    for name, phase in phases.items():
        if phase.user not in (None, "root", 0, "0"):
            done = await box.exec(f"{_as(phase.user)} true", timeout_s=30.0, lease="")
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


def _as(user: str | int | None) -> str:
    """The shell's words before a quoted command that `user` is to run: a name, or the number of one."""
    if str(user).isdecimal():  # which `su` does not take
        return f"su -s /bin/sh \"$(sed -n 's/^\\([^:]*\\):[^:]*:{user}:.*/\\1/p' /etc/passwd)\" -c"
    return f"su -s /bin/sh {shlex.quote(str(user))} -c"


async def _verified(task: HarborTask, box: Box, backend: SandboxBackend, spec: SandboxSpec) -> Outcome:
    """Run the tests. Raises SandboxError for what is not the task's own doing."""
    if task.verifier.environment_mode is VerifierMode.shared:
        box.set_network(task.hosts(task.verifier))
        box.kill_all()
        return await _tested(task, box)
    with tempfile.TemporaryDirectory() as folder:
        try:
            taken = await _collected(task, box, task.verifier.collect, Path(folder))
        except TransferLimit as error:  # the agent's doing, and not the machine's
            return Outcome(error=f"what the agent left is more than is taken to the verifier: {error}")
        await box.close()
        other = task.verifier.environment
        image = task.image if other is None else other.docker_image or str(task.folder / "tests")
        own: dict[str, object] = {"image": image, "allowed_hosts": task.hosts(task.verifier)}
        if other is not None:
            own |= {"memory_mb": other.memory_mb, "cpus": other.cpus, "workdir": other.workdir}
        fresh = await backend.create(spec.model_copy(update=own))
        assert isinstance(fresh, Box)  # noqa: S101 - as the agent's was
        try:
            await _must(fresh, f"mkdir -p {FOLDERS}")
            for path, local in taken.items():
                await fresh.upload(local, path if local.is_dir() else str(Path(path).parent))
            return await _tested(task, fresh)
        finally:
            await fresh.close()


async def _collected(task: HarborTask, box: Box, collect: tuple[Collect, ...], folder: Path) -> dict[str, Path]:
    """Path in the box -> where it is now; what the agent did not make is left out."""
    for step in collect:
        await box.exec(step.command, timeout_s=step.timeout_sec, lease="")
    box.kill_all()
    taken = {}
    for n, path in enumerate(dict.fromkeys([COLLECTED, *task.artifacts])):
        local = folder / str(n) / Path(path).name
        with suppress(PathError):
            await box.download(path, local)
            taken[path] = local
    return taken


async def _tested(task: HarborTask, box: Box) -> Outcome:
    await _must(box, f"[ ! -L /logs ] && rm -rf {TESTS} {LOGS} && mkdir -p {TESTS} {LOGS} && chmod 777 {LOGS}")
    await box.upload(task.folder / "tests", TESTS)
    await _must(box, f"chmod -R a+rX {TESTS} && chmod a+x {TESTS}/test.sh")
    room = Room(box, task.verifier, task.environment.env)
    done = await room.exec(f"{TESTS}/test.sh > {LOGS}/test-stdout.txt 2>&1")
    box.kill_all()
    told = await _printed(box)
    if done.timed_out:
        return Outcome(error=f"tests/test.sh took more than {task.verifier.timeout_sec:g} s{told}")
    if done.exit_code in (126, 127):
        shebang = (task.folder / "tests" / "test.sh").read_bytes().partition(b"\n")[0][:80]
        why = f"its first line is {shebang.decode(errors='replace')!r}"
        return Outcome(error=f"tests/test.sh cannot be run (exit code {done.exit_code}; {why}){told}")
    for name, read in (("reward.json", _from_json), ("reward.txt", _from_text)):
        try:
            said = await box.read(f"{LOGS}/{name}", max_bytes=MAX_REWARD_BYTES)
        except PathError:
            continue
        except TransferLimit as error:
            return Outcome(error=f"tests/test.sh wrote no reward to {name}: {error}{told}")
        try:
            return Outcome(value=_checked(read(said.decode())))
        except ValueError as error:
            return Outcome(error=f"tests/test.sh wrote no reward to {name}: {error}{told}")
    return Outcome(error=f"tests/test.sh (exit code {done.exit_code}) wrote neither reward.json nor reward.txt{told}")


async def _printed(box: Box) -> str:
    """The end of what the tests printed, for a person who asks why there is no reward."""
    done = await box.exec(f"tail -c {MAX_SAID} {LOGS}/test-stdout.txt", timeout_s=10.0, lease="")
    text = " ".join(done.stdout.split())
    return f"; it printed: {text}" if text else "; it printed nothing"


def _from_text(text: str) -> object:
    try:
        return float(text.strip())
    except ValueError:
        raise ValueError(f"{text.strip()[:60]!r} is not one number") from None


def _from_json(text: str) -> object:
    try:
        rewards = json.loads(text)
    except RecursionError:
        raise ValueError(f"{text[:20]!r}… is nested too deep") from None
    if not isinstance(rewards, dict):
        return rewards
    if "reward" in rewards:
        return rewards["reward"]
    if len(rewards) != 1:
        raise ValueError(f"{len(rewards)} numbers and none of them called reward ({', '.join(rewards)[:60]})")
    return next(iter(rewards.values()))


def _checked(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{value!r} is not a number from 0 to 1")
    return float(value)


async def _must(box: Box, command: str) -> None:
    done = await box.exec(command, timeout_s=60.0, lease="")
    if done.exit_code:
        raise SandboxError(f"the box cannot be made ready ({command}): {(done.stderr or done.stdout).strip()[:200]}")
