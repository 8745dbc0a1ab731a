"""Any agent program, run in a box whose only network is the gateway: what it asks of models becomes the trace.

    the box: program ─▶ 127.0.0.1:3128 ─▶ the box's one connection ─▶ egress ─▶ unix socket ─▶ gateway ─▶ the policy

It finds the usual variables of the OpenAI and Anthropic libraries, and nothing that is worth stealing: the key is no
key, and the token in the base URL is good for this episode alone. The gateway lives in this process, while any
episode of this agent does. What the program does without a model is not seen; what it printed last is a result of
the last step.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path

from agentloop.agents.program import ProgramSandbox, Ran, ran_to_its_end
from agentloop.costs.totals import unpriced
from agentloop.errors import AgentCrashed, CapabilityError, ConfigError, PathError, UpstreamUnavailable
from agentloop.gateway.grants import Grant
from agentloop.gateway.local import LocalGateway
from agentloop.otel.spans import trace_of
from agentloop.protocols import Policy, Record, Sandbox
from agentloop.sandbox.inside.frames import PROXY_PORT
from agentloop.types import Completion, Message, Step, StopReason, Task, ToolCall, ToolResult, Trace

INSTRUCTION = "/tmp/instruction.md"  # noqa: S108 - the box's own
MAX_VARIABLE = 16_384
"""Characters of an instruction that is a variable, too: programs with one of 128 KiB cannot be started."""
KEY = "no-key-is-needed"


class Command:
    """One program, whoever wrote it."""

    name = "command"

    def __init__(
        self,
        command: str,
        *,
        files: Path | None = None,
        answer_file: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 3600.0,
    ) -> None:
        """command: for `sh -c`, in the task's folder of the box.

        files: folder that its boxes show at /agent, read-only. answer_file: a path in the box that
        holds the answer at the end; without one that is what the model said last. env: further variables of the
        program's. timeout_s: where the task sets no time.
        """
        if files is not None and not files.is_dir():
            raise ConfigError(f"agent 'command': {files} is no folder; name the one that holds the program's files")
        self.files = files and files.resolve()
        self.program = True
        self._command, self._answer_file = command, answer_file
        self._env, self._timeout_s = dict(env or {}), timeout_s
        self._gateway = LocalGateway()

    def first_messages(self, task: Task) -> tuple[Message, ...]:
        """The instruction: what the program makes of it, its first step heard."""
        return (Message(role="user", content=task.instruction),)

    async def run(
        self, task: Task, policy: Policy, sandbox: Sandbox, *, seed: int, record: Record
    ) -> tuple[StopReason, str | None]:
        """Start the program and wait for its end; see `protocols.Agent`.

        A program that is ended at a limit is a result. Raises AgentCrashed when it ends with another exit code than 0
        or prints too much, TransferLimit for an answer file that is too large, UpstreamUnavailable when the upstream
        of the last call was unreachable or answered 429 or 5xx, CapabilityError for a sandbox that leads to no
        gateway, and ConfigError where money is limited and the price of an answer is not known.
        """
        if not isinstance(sandbox, ProgramSandbox):
            raise CapabilityError(
                "agent 'command' needs a box of its own that leads to the gateway: docker or bubblewrap, "
                "and a task without `read_only = true`"
            )
        limit_s, ran = min(self._timeout_s, task.limits.max_wall_s or math.inf), None
        async with self._gateway.opened() as (socket, grants):
            grant = Grant(policy, task.limits, seed)
            try:
                async with grants.granted(grant):
                    sandbox.set_gateway(socket)
                    try:
                        ran = await ran_to_its_end(
                            sandbox,
                            await self._prepared(task, sandbox, grant),
                            limit_s,
                            task.limits.max_output,
                            grant.stopped,
                        )
                    finally:
                        sandbox.set_gateway(None)
            finally:
                told = trace_of(grant.spans) if grant.spans else None
                # A call that was cut when the program ended is nobody's turn; how that was, its last result says.
                told = told and told.model_copy(update={"steps": told.answered})
                _record(told, ran, self._command, record)
        return await self._outcome(ran, grant, told, sandbox)

    async def _prepared(self, task: Task, box: ProgramSandbox, grant: Grant) -> str:
        """Bring what it needs; the line that starts it."""
        await box.write(INSTRUCTION, task.instruction.encode())
        way = f"http://127.0.0.1:{PROXY_PORT}/e/{grant.token}"
        variables = {
            "OPENAI_BASE_URL": f"{way}/v1",
            "OPENAI_API_BASE": f"{way}/v1",
            "OPENAI_API_KEY": KEY,
            "ANTHROPIC_BASE_URL": way,
            "ANTHROPIC_API_KEY": KEY,
            "AGENTLOOP_MODEL": grant.target.model,
            "AGENTLOOP_INSTRUCTION_FILE": INSTRUCTION,
            **({"AGENTLOOP_INSTRUCTION": task.instruction} if len(task.instruction) <= MAX_VARIABLE else {}),
            **self._env,
        }
        return "".join(f"export {k}={shlex.quote(v)}; " for k, v in variables.items()) + self._command

    async def _outcome(
        self, ran: Ran, grant: Grant, told: Trace | None, box: ProgramSandbox
    ) -> tuple[StopReason, str | None]:
        if grant.unpriced:
            raise unpriced(grant.target.model)
        if grant.failed is not None:
            raise UpstreamUnavailable(grant.failed.error or "the last call of the model got no answer")
        if ran.timed_out:
            return StopReason.time_limit, None
        if grant.stop is not None:
            return grant.stop, None
        if ran.exit_code or ran.flooded:
            if grant.overflowed:
                return StopReason.context_limit, None
            unanswered = told is None or not told.steps
            how = "printed too much and was killed" if ran.flooded else f"ended with exit code {ran.exit_code}"
            when = " before a model answered it" if unanswered else ""
            raise AgentCrashed(f"agent 'command' {how}{when}: {ran.said[-500:]}")
        answer = await self._answer(told, box)
        return (StopReason.no_tool_call if answer is None else StopReason.submitted), answer

    async def _answer(self, told: Trace | None, box: ProgramSandbox) -> str | None:
        if self._answer_file is not None:
            try:
                return (await box.read(self._answer_file, max_bytes=1 << 20)).decode(errors="replace").rstrip("\n")
            except PathError:
                return None
        said = (step.completion.message.content for step in reversed(told.steps if told else ()))
        return next((text for text in said if text.strip()), None)


def _record(told: Trace | None, ran: Ran | None, command: str, record: Record) -> None:
    """The steps; on the last one, how the program ended. One that never asked has a step that is nobody's turn."""
    result = ran and ToolResult(
        call_id=Command.name,
        name=Command.name,
        content=ran.said,
        ok=not (ran.exit_code or ran.timed_out or ran.flooded),
        exit_code=ran.exit_code,
        timed_out=ran.timed_out,
        duration_s=ran.duration_s,
    )
    if told is None or not told.steps:
        if result is not None:
            call = ToolCall(id=Command.name, name=Command.name, arguments=json.dumps({"command": command}))
            nobody = Completion(message=Message(role="assistant", tool_calls=(call,)), finish_reason="stop")
            record(Step(index=0, completion=nobody, results=(result,), copied=True))
        return
    # What the program was told, the model was not: its context begins with the program's own words.
    heard = (*told.messages, *told.steps[0].heard)
    steps = [told.steps[0].model_copy(update={"heard": heard, "context": heard}), *told.steps[1:]]
    if result is not None:
        steps[-1] = steps[-1].model_copy(update={"results": (*steps[-1].results, result)})
    for step in steps:
        record(step)
    for child in told.children:  # its ids are of the gateway's calls: the token is nobody's episode
        record(child.model_copy(update={"trace": child.trace.model_copy(update={"episode_id": None})}))
