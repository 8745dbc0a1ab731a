"""A task's box as one phase sees it, and where things lie in it."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping

from agentloop.config import from_environment
from agentloop.errors import SandboxError
from agentloop.harbor.task import Phase
from agentloop.sandbox.box import Box
from agentloop.types import ExecResult

TESTS, LOGS, SOLUTION = "/tests", "/logs/verifier", "/solution"
FOLDERS = "/logs/agent /logs/verifier /logs/artifacts"
COLLECTED = "/logs/artifacts"
ROOT = (None, "root", 0, "0")
MAX_OUTPUT = 65_536


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
        if self._user not in ROOT:
            command = f"exec {words_as(self._user)} {shlex.quote(variables + command)}"
        return await self.box.exec(variables + command, timeout_s=left, max_output=max_output, lease="")

    async def close(self) -> None:
        """The box is the trial's to close."""


def words_as(user: str | int | None) -> str:
    """The shell's words before a quoted command that `user` is to run: a name, or the number of one."""
    if str(user).isdecimal():  # which `su` does not take
        return f"su -s /bin/sh \"$(sed -n 's/^\\([^:]*\\):[^:]*:{user}:.*/\\1/p' /etc/passwd)\" -c"
    return f"su -s /bin/sh {shlex.quote(str(user))} -c"


async def must(box: Box, command: str) -> None:
    """Raises SandboxError when `command` does not end well."""
    done = await box.exec(command, timeout_s=60.0, lease="")
    if done.exit_code:
        raise SandboxError(f"the box cannot be made ready ({command}): {(done.stderr or done.stdout).strip()[:200]}")
