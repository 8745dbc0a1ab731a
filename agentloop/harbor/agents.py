"""Who works on a Harbor task: its own solution, nobody, chance, a cheat, or the reference agent with a policy."""

from __future__ import annotations

import json
import math
import random
import re
import shlex
import time

from agentloop.abilities import BringsFiles, is_on_host, runs_program
from agentloop.agents.tool_loop import ToolLoop
from agentloop.config.sections import from_environment
from agentloop.errors import ConfigError
from agentloop.harbor.room import MAX_OUTPUT, SOLUTION, Room
from agentloop.harbor.task import HarborTask
from agentloop.protocols import Agent, Policy, Record
from agentloop.rollout.actors import NOBODY, ORACLE, RANDOM
from agentloop.types import (
    Completion,
    Limits,
    Message,
    SandboxSpec,
    Step,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
)

N_RANDOM = 8
MAX_STEPS = 100
MAX_TOKENS = 4096


class Oracle:
    """Runs the task's own solution: a task whose oracle does not score 1 is broken."""

    name = ORACLE

    async def work(self, task: HarborTask, room: Room, record: Record) -> StopReason:
        """See `trial.TrialAgent`."""
        if not (task.folder / "solution" / "solve.sh").is_file():
            raise ConfigError(f"{task.folder}: no solution/solve.sh for the oracle to run")
        await room.box.upload(task.folder / "solution", SOLUTION)
        exports = "".join(f"export {k}={shlex.quote(from_environment(v))}; " for k, v in task.solution.env.items())
        # By the box's root, because the agent's user does not own what was brought.
        await room.box.exec(f"chmod -R a+rX {SOLUTION}; chmod a+x {SOLUTION}/solve.sh", lease="")
        command = f"{exports}{SOLUTION}/solve.sh"
        record(await run_step(room, command, f"{SOLUTION}/solve.sh", said="solution/solve.sh"))
        return StopReason.submitted


class Nobody:
    """Does nothing: a task that scores more than 0 with it checks nothing."""

    name = NOBODY

    async def work(self, task: HarborTask, room: Room, record: Record) -> StopReason:
        """See `trial.TrialAgent`."""
        return StopReason.no_tool_call


class Random:
    """Runs commands and writes files at random: a verifier that lets that pass checks too little."""

    name = RANDOM

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    async def work(self, task: HarborTask, room: Room, record: Record) -> StopReason:
        """See `trial.TrialAgent`."""
        draw = random.Random(f"{self._seed} {task.name}")
        for index in range(N_RANDOM):
            path = draw.choice([*named_paths(task), f"/tmp/{draw.randrange(10)}"])  # noqa: S108 - the box's own
            text = " ".join(draw.choices((*task.instruction.split(), *"0123456789"), k=draw.randrange(8)))
            command = draw.choice(
                (
                    f"printf '%s\n' {shlex.quote(text)} > {path}",
                    f"touch {path}",
                    f"ls -la {path}",
                    f"cp -r {path} {path}.copy",
                    f"sed -i 's/0/1/' {path}",
                    "true",
                )
            )
            record(await run_step(room, command, command, said=text, index=index))
        return StopReason.submitted


class PolicyAgent:
    """An agent with a policy: the reference agent, or another; its phase's time is the limit."""

    def __init__(self, policy: Policy, agent: Agent | None = None, *, seed: int = 0) -> None:
        """seed: of its sampling; trials that are to be independent need one each. Raises ConfigError for `OnHost`."""
        if is_on_host(agent):
            raise ConfigError(
                "the agent acts on this machine, and a Harbor task is done in its sandbox; run a program there, with "
                '[agent] kind = "command"'
            )
        self._policy, self._agent, self._seed = policy, agent or ToolLoop(), seed
        self.name = self._agent.name
        self.files = agent.files if isinstance(agent, BringsFiles) else None
        self.program = runs_program(agent)

    async def work(self, task: HarborTask, room: Room, record: Record) -> StopReason:
        """See `trial.TrialAgent`."""
        limits = Limits(
            max_steps=MAX_STEPS,
            max_tokens=MAX_TOKENS,
            tool_timeout_s=task.agent.timeout_sec,
            max_output=MAX_OUTPUT,
            max_wall_s=room.left_s,
        )
        spec = SandboxSpec(image=task.image, root=True)
        known = Task(id=task.name, instruction=task.instruction, sandbox=spec, limits=limits)
        stop, _ = await self._agent.run(known, self._policy, room, seed=self._seed, record=record)
        # The work is in the box: having no more to do is how it is handed in.
        return StopReason.submitted if stop is StopReason.no_tool_call else stop


async def run_step(
    room: Room, command: str, shown: str, *, said: str, index: int = 0, timeout_s: float = math.inf
) -> Step:
    """Run `command` and record it as the call `shown`."""
    started = time.perf_counter()
    done = await room.exec(command, timeout_s=timeout_s)
    call = ToolCall(id=f"call_{index}", name="shell", arguments=json.dumps({"command": shown}))
    result = ToolResult(
        call_id=call.id,
        name=call.name,
        content=(done.stdout + done.stderr).rstrip("\n"),
        ok=not done.exit_code and not done.timed_out,
        exit_code=done.exit_code,
        timed_out=done.timed_out,
        duration_s=done.duration_s,
    )
    completion = Completion(message=Message(role="assistant", content=said, tool_calls=(call,)), finish_reason="stop")
    return Step(index=index, completion=completion, results=(result,), duration_s=time.perf_counter() - started)


def named_paths(task: HarborTask) -> list[str]:
    """Absolute paths that the instruction names, without the full stop that may follow one."""
    found = re.findall(r"(?<![\w.])(/[\w][\w./-]*)", task.instruction)
    return list(dict.fromkeys(path.rstrip("./-") for path in found))
