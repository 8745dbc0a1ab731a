"""Who works on a Harbor task: its own solution, nobody, or the reference agent with a policy."""

from __future__ import annotations

import json
import shlex
import time

from agentloop.agents.tool_loop import ToolLoop
from agentloop.config import from_environment
from agentloop.errors import ConfigError
from agentloop.harbor.task import HarborTask
from agentloop.harbor.trial import MAX_OUTPUT, SOLUTION, Room
from agentloop.protocols import Policy
from agentloop.types import Completion, Limits, Message, SandboxSpec, Step, StopReason, Task, ToolCall, ToolResult

MAX_STEPS = 100
MAX_TOKENS = 4096


class Oracle:
    """Runs the task's own solution: a task whose oracle does not score 1 is broken."""

    name = "oracle"

    async def work(self, task: HarborTask, room: Room, steps: list[Step]) -> StopReason:
        """See `trial.TrialAgent`."""
        if not (task.folder / "solution" / "solve.sh").is_file():
            raise ConfigError(f"{task.folder}: no solution/solve.sh for the oracle to run")
        await room.box.upload(task.folder / "solution", SOLUTION)
        exports = "".join(f"export {k}={shlex.quote(from_environment(v))}; " for k, v in task.solution.env.items())
        # By the box's root, because the agent's user does not own what was brought.
        await room.box.exec(f"chmod -R a+rX {SOLUTION}; chmod a+x {SOLUTION}/solve.sh", lease="")
        command = f"{exports}{SOLUTION}/solve.sh"
        started = time.perf_counter()
        done = await room.exec(command)
        call = ToolCall(id="call_0", name="shell", arguments=json.dumps({"command": f"{SOLUTION}/solve.sh"}))
        result = ToolResult(
            call_id=call.id,
            name=call.name,
            content=(done.stdout + done.stderr).rstrip("\n"),
            ok=not done.exit_code and not done.timed_out,
            exit_code=done.exit_code,
            timed_out=done.timed_out,
            duration_s=done.duration_s,
        )
        said = Message(role="assistant", content="solution/solve.sh", tool_calls=(call,))
        completion = Completion(message=said, finish_reason="stop")
        steps.append(Step(index=0, completion=completion, results=(result,), duration_s=time.perf_counter() - started))
        return StopReason.submitted


class Nobody:
    """Does nothing: a task that scores more than 0 with it checks nothing."""

    name = "nop"

    async def work(self, task: HarborTask, room: Room, steps: list[Step]) -> StopReason:
        """See `trial.TrialAgent`."""
        return StopReason.no_tool_call


class ToolLoopAgent:
    """The reference agent with a policy; its phase's time is the limit."""

    name = "tool_loop"

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    async def work(self, task: HarborTask, room: Room, steps: list[Step]) -> StopReason:
        """See `trial.TrialAgent`."""
        limits = Limits(
            max_steps=MAX_STEPS,
            max_tokens=MAX_TOKENS,
            tool_timeout_s=task.agent.timeout_sec,
            max_output=MAX_OUTPUT,
        )
        known = Task(id=task.name, instruction=task.instruction, sandbox=SandboxSpec(image=task.image), limits=limits)
        stop, _ = await ToolLoop().run(known, self._policy, room, seed=0, record=steps.append)
        # The work is in the box: having no more to do is how it is handed in.
        return StopReason.submitted if stop is StopReason.no_tool_call and steps else stop
