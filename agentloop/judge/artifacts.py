"""What an agent left, taken out of its sandbox when it is done, and put into a fresh one for its verifiers.

The sandbox's processes are ended first. What comes out goes through the limits of a transfer; what a
verifier does not name stays behind. What is beyond the limits is the agent's outcome, worth 0. The
fresh sandbox is made from the task's own spec, without network, and a path that the agent removed is
removed there, too.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from agentloop.abilities import FileSandbox, artifacts_of
from agentloop.errors import PathError, SandboxError, TransferLimit
from agentloop.judge.score import FreshSandbox, TooMuch, name_verifiers
from agentloop.protocols import Pool, Sandbox
from agentloop.types import Task

MAX_BYTES = 64 << 20
"""Of one artifact."""
NO_FILES = "its sandbox hands out no files; use docker or bubblewrap, and a suite whose [sandbox] is not read_only"


@dataclass
class Artifacts:
    """Of one episode."""

    files: dict[str, Path] = field(default_factory=dict)
    """Path in the sandbox -> where it is now; what was not there is not in it."""
    too_much: dict[str, str] = field(default_factory=dict)
    """Path in the sandbox -> which limit it is beyond, in size, number of files, depth or time."""
    problems: dict[str, str] = field(default_factory=dict)
    """Path in the sandbox -> why it could not be taken, for reasons that are not the agent's."""


def wanted(task: Task) -> list[str]:
    """Every path that some verifier of `task` names."""
    paths = (path for verifier in name_verifiers(task).values() for path in artifacts_of(verifier))
    return list(dict.fromkeys(paths))


async def collect(task: Task, sandbox: Sandbox, folder: Path) -> Artifacts:
    """Take what verifiers want into the new folder `folder`. Raises SandboxGone."""
    artifacts = Artifacts()
    paths = wanted(task)
    if not paths:
        return artifacts
    if not isinstance(sandbox, FileSandbox):
        return Artifacts(problems=dict.fromkeys(paths, NO_FILES))
    sandbox.kill_all()
    for n, path in enumerate(paths):
        local = folder / str(n) / PurePosixPath(path).name
        try:
            await sandbox.download(path, local, max_bytes=MAX_BYTES)
            artifacts.files[path] = local
        except TransferLimit as error:
            artifacts.too_much[path] = str(error)
        except PathError:
            continue
    return artifacts


def fresh_sandboxes(task: Task, pool: Pool, artifacts: Artifacts, name: str) -> FreshSandbox:
    """Makes sandboxes with artifacts in their places; `name` is the episode's."""

    @asynccontextmanager
    async def fresh(paths: Sequence[str]) -> AsyncIterator[Sandbox]:
        for path in paths:
            if path in artifacts.too_much:
                raise TooMuch(f"{path} cannot be judged: {artifacts.too_much[path]}")
            if path in artifacts.problems:
                raise SandboxError(f"{path}: {artifacts.problems[path]}")
        async with pool.lease(task.sandbox.model_copy(update={"allowed_hosts": ()}), f"verify-{name}") as sandbox:
            if not isinstance(sandbox, FileSandbox):
                raise SandboxError(NO_FILES)
            await _put(sandbox, paths, artifacts.files)
            yield sandbox

    return fresh


async def _put(sandbox: FileSandbox, paths: Sequence[str], files: Mapping[str, Path]) -> None:
    for path in paths:
        gone = await sandbox.exec(f"rm -rf -- {shlex.quote(path)}")
        if gone.exit_code:
            raise SandboxError(f"{path} cannot be replaced in a fresh sandbox: {gone.stderr.strip()[:200]}")
        if path in files:
            local = files[path]
            await sandbox.upload(local, path if local.is_dir() else str(PurePosixPath(path).parent))
