"""The reference agent: ask the policy, do what it says, show it what happened, until it submits.

It does not judge, store or retry. A call that cannot be made is answered with an error that the
policy sees, so a wrong call can be recovered from.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from agentloop.agents.tools import SUBMIT, TOOLS, argument, refused, run_shell
from agentloop.protocols import Policy, Sandbox
from agentloop.types import Completion, Message, Step, StopReason, Task, ToolResult


class ToolLoop:
    """Shell and submit, one conversation, no memory between episodes."""

    name = "tool_loop"

    def first_messages(self, task: Task) -> tuple[Message, ...]:
        """The instruction alone: the tools' own descriptions say the rest."""
        return (Message(role="user", content=task.instruction),)

    async def run(
        self, task: Task, policy: Policy, sandbox: Sandbox, *, seed: int, record: Callable[[Step], None]
    ) -> tuple[StopReason, str | None]:
        """Take up to `task.limits.max_steps` turns. See `protocols.Agent`."""
        messages = list(self.first_messages(task))
        for index in range(task.limits.max_steps):
            started = time.perf_counter()
            completion = await policy.complete(messages, TOOLS, max_tokens=task.limits.max_tokens, seed=seed + index)
            results, answer = await self._act(task, completion, sandbox)
            record(Step(index=index, completion=completion, results=results, duration_s=time.perf_counter() - started))
            if answer is not None:
                return StopReason.submitted, answer
            if completion.finish_reason == "context":
                return StopReason.context_limit, None
            if not completion.message.tool_calls:
                return StopReason.no_tool_call, None
            messages.append(completion.message)
            messages += [Message(role="tool", content=r.content, tool_call_id=r.call_id) for r in results]
        return StopReason.step_limit, None

    async def _act(
        self, task: Task, completion: Completion, sandbox: Sandbox
    ) -> tuple[tuple[ToolResult, ...], str | None]:
        """Make the calls in order; a submission ends the turn and leaves later calls unmade."""
        results: list[ToolResult] = []
        for call in completion.message.tool_calls:
            value, why = argument(call)
            if why is not None:
                results.append(refused(call, why))
            elif call.name == SUBMIT.name:
                return tuple(results), value
            else:
                results.append(await run_shell(call, value, sandbox, task.limits))
        return tuple(results), None
