"""A task's box as one phase sees it, and where things lie in it."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping
from pathlib import Path

from agentloop.abilities import LeadsToGateway, LiveProcess, WholeSandbox
from agentloop.config.sections import from_environment
from agentloop.errors import CapabilityError, SandboxError
from agentloop.harbor.task import Phase
from agentloop.types import ExecResult

TESTS, LOGS, SOLUTION = "/tests", "/logs/verifier", "/solution"
FOLDERS = "/logs/agent /logs/verifier /logs/artifacts"
COLLECTED = "/logs/artifacts"
ROOT = (None, "root", 0, "0")
MAX_OUTPUT = 65_536


class Room:
    """A task's box as one phase sees it: its user, its variables, its time."""

    def __init__(self, box: WholeSandbox, phase: Phase, env: Mapping[str, str]) -> None:
        self.box, self.id, self.isolation = box, box.id, box.isolation
        self._user, self._env = phase.user, {**env, **phase.env}
        self.ends_at = time.monotonic() + phase.timeout_sec

    @property
    def left_s(self) -> float:
        """Of the phase's time; next to nothing when it is over."""
        return max(0.01, self.ends_at - time.monotonic())

    async def exec(self, command: str, *, timeout_s: float = math.inf, max_output: int = MAX_OUTPUT) -> ExecResult:
        """See `protocols.Sandbox`; the phase's time is the limit."""
        left = min(timeout_s, self.left_s)
        return await self.box.exec(self._as_its_user(command), timeout_s=left, max_output=max_output, lease="")

    def start(self, command: str) -> LiveProcess:
        """See `abilities.Streams`. It ends with the box, if not before."""
        return self.box.start(self._as_its_user(command), lease="")

    def _as_its_user(self, command: str) -> str:
        variables = "".join(f"export {k}={shlex.quote(from_environment(v))}; " for k, v in self._env.items())
        if self._user not in ROOT:
            command = f"exec {words_as(self._user)} {shlex.quote(variables + command)}"
        return variables + command

    async def write(self, path: str, data: bytes) -> None:
        """See `abilities.Files`."""
        await self.box.write(path, data)

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """See `abilities.Files`."""
        return await self.box.read(path, max_bytes=max_bytes)

    def set_gateway(self, gateway: Path | None) -> None:
        """See `abilities.LeadsToGateway`. Raises CapabilityError where the task's sandbox leads to none."""
        if not isinstance(self.box, LeadsToGateway):
            raise CapabilityError("this sandbox leads to no gateway, which an agent program needs; use docker")
        self.box.set_gateway(gateway)

    async def close(self) -> None:
        """The box is the trial's to close."""


def words_as(user: str | int | None) -> str:
    """The shell's words before a quoted command that `user` is to run: a name, or the number of one."""
    if str(user).isdecimal():  # which `su` does not take
        return f"su -s /bin/sh \"$(sed -n 's/^\\([^:]*\\):[^:]*:{user}:.*/\\1/p' /etc/passwd)\" -c"
    return f"su -s /bin/sh {shlex.quote(str(user))} -c"


async def must(box: WholeSandbox, command: str, error: type[SandboxError] = SandboxError) -> None:
    """Raises `error` when `command` does not end well."""
    done = await box.exec(command, timeout_s=60.0, lease="")
    if done.exit_code:
        raise error(f"the sandbox cannot be made ready ({command}): {(done.stderr or done.stdout).strip()[:200]}")
