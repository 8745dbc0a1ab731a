"""The tools an agent offers to a policy, and what calling one does.

A tool that fails gives a result that the policy can read and recover from. Only a dead box raises.
"""

from __future__ import annotations

import json

from agentloop.protocols import Sandbox
from agentloop.types import Limits, ToolCall, ToolResult, ToolSpec

SHELL = ToolSpec(
    name="shell",
    description="Run a POSIX shell command in the working directory and see what it prints.",
    parameters={
        "type": "object",
        "properties": {"command": {"type": "string", "description": "The command, as for sh -c."}},
        "required": ["command"],
        "additionalProperties": False,
    },
)
SUBMIT = ToolSpec(
    name="submit",
    description="Submit the final answer, nothing but the answer. This ends the task.",
    parameters={
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The answer itself."}},
        "required": ["answer"],
        "additionalProperties": False,
    },
)
TOOLS = (SHELL, SUBMIT)
STDERR_HIDDEN = "error: the command wrote to stderr"
"""What an agent is told of error output when the task does not show it."""


def argument(call: ToolCall) -> tuple[str, str | None]:
    """(value of the one string argument of `call`, None), or ("", why it cannot be used)."""
    if call.error:
        return "", f"malformed call: {call.error}"
    tool = next((t for t in TOOLS if t.name == call.name), None)
    if tool is None:
        return "", f"no tool {call.name!r} (tools: {', '.join(t.name for t in TOOLS)})"
    try:
        arguments = json.loads(call.arguments)
        json.dumps(arguments, ensure_ascii=False).encode()  # half a surrogate pair is JSON, but no text
    except (ValueError, RecursionError) as error:
        return "", f"malformed call: arguments are not JSON: {error}"
    (key,) = tool.parameters["required"]
    if not isinstance(arguments, dict) or set(arguments) != {key} or not isinstance(arguments[key], str):
        return "", f"malformed call: {call.name} takes exactly one argument, the string {key!r}"
    return arguments[key], None


async def run_shell(call: ToolCall, command: str, sandbox: Sandbox, limits: Limits) -> ToolResult:
    """Run `command` in the box; the content is what it printed, led by the exit code when that is not 0."""
    done = await sandbox.exec(command, timeout_s=limits.tool_timeout_s, max_output=limits.max_output)
    printed = (done.stdout + (done.stderr if limits.show_stderr else "")).rstrip("\n")
    if done.stderr and not limits.show_stderr:
        printed = f"{STDERR_HIDDEN}\n{printed}".rstrip("\n")
    if done.timed_out:
        printed = f"timed out after {limits.tool_timeout_s:g} s\n{printed}".rstrip("\n")
    elif done.exit_code != 0:
        printed = f"exit code {done.exit_code}\n{printed}".rstrip("\n")
    return ToolResult(
        call_id=call.id,
        name=call.name,
        content=printed,
        ok=done.exit_code == 0 and not done.timed_out,
        exit_code=done.exit_code,
        timed_out=done.timed_out,
        duration_s=done.duration_s,
    )


def refused(call: ToolCall, why: str) -> ToolResult:
    """The observable answer to a call that could not be made."""
    return ToolResult(call_id=call.id, name=call.name, content=f"error: {why}", ok=False)
