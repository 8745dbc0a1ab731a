"""Optional abilities of sandboxes, verifiers, agents, experience and exporters, each a Protocol of its own.

`protocols.py` has what every part must offer. A part that offers more has the methods or attributes below, and the
engine asks with `isinstance(part, Files)`: never for a class of ours, so parts of other packages are served the same
way. A check looks at names alone; a method with other parameters fails when it is called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from agentloop.protocols import Draft, Experience, GroupVerifier, Sandbox, Verifier
from agentloop.types import (
    Attempt,
    Component,
    ExecResult,
    Message,
    PolicyVersion,
    Rehearsal,
    SandboxSpec,
    Task,
    ToolSpec,
    Trace,
)

# --------------------------------------------------------------------------------------------------- of sandboxes


class ByteSource(Protocol):
    """An output of a process. What is not read here fills a buffer there, and then the process waits."""

    async def read(self) -> bytes:
        """The next bytes; b"" at the end. Raises SandboxGone."""
        ...

    def __aiter__(self) -> AsyncIterator[bytes]:
        """The pieces, to the end."""
        ...


class ByteSink(Protocol):
    """The input of a process."""

    async def write(self, data: bytes) -> None:
        """Returns when all of it is on its way. Raises SandboxGone."""
        ...

    def close(self) -> None:
        """The end of the input."""
        ...


class LiveProcess(Protocol):
    """A command that is used while it runs."""

    @property
    def stdin(self) -> ByteSink: ...

    @property
    def stdout(self) -> ByteSource: ...

    @property
    def stderr(self) -> ByteSource: ...

    async def wait(self) -> ExecResult:
        """Its end; what it printed is on its outputs. Raises SandboxGone."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal to its process group."""
        ...

    def kill(self) -> None:
        """End it and all that it started. Whoever reads or writes it goes on."""
        ...


class Copied(Protocol):
    """What a copy out of a sandbox brought."""

    @property
    def n_files(self) -> int: ...

    @property
    def skipped(self) -> tuple[str, ...]:
        """Links, devices and the like, which stayed behind."""
        ...


@runtime_checkable
class Streams(Protocol):
    """A sandbox that keeps a program running: for the tools `python` and MCP over stdio, and for agent programs."""

    def start(self, command: str) -> LiveProcess:
        """Run `command` with `sh -c` and go on. Raises SandboxGone."""
        ...


@runtime_checkable
class LeasedStreams(Protocol):
    """`Streams` of a sandbox that several episodes use."""

    def start(self, command: str, *, lease: str = "sandbox") -> LiveProcess:
        """`lease` names the scratch folder; "" is the environment that the image sets, without one."""
        ...


@runtime_checkable
class Files(Protocol):
    """A sandbox that hands single files in and out."""

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """The bytes of one file. Raises PathError, TransferLimit."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace one file. Raises PathError."""
        ...


@runtime_checkable
class Folders(Protocol):
    """A sandbox that hands folders in and out: for verifiers with artifacts, and for forks."""

    async def upload(self, source: Path, target: str) -> None:
        """Copy a folder's contents, or a file, into the folder `target` of the sandbox. Raises PathError."""
        ...

    async def download(self, path: str, target: Path, *, max_bytes: int = ..., max_entries: int = ...) -> Copied:
        """Copy a file or folder of the sandbox to the new path `target`. Raises PathError, TransferLimit."""
        ...


@runtime_checkable
class EndsProcesses(Protocol):
    """A sandbox whose processes can be ended while its files stay."""

    def kill_all(self) -> None:
        """End every process that a command started."""
        ...


@runtime_checkable
class LeadsToGateway(Protocol):
    """A sandbox whose only network is the model gateway: for agent programs."""

    def set_gateway(self, gateway: Path | None) -> None:
        """From now on `http://127.0.0.1:3128/` is, in the sandbox, this unix socket of the host; or nobody."""
        ...


@runtime_checkable
class FileSandbox(Sandbox, Files, Folders, EndsProcesses, Protocol):
    """A sandbox whose files can be judged: artifacts are taken from one, and verifiers are given one."""


@runtime_checkable
class WholeSandbox(FileSandbox, Protocol):
    """A sandbox in which a Harbor task can be done: files, streams, and commands in the image's own environment."""

    async def exec(
        self, command: str, *, timeout_s: float = 30.0, max_output: int = 16_384, lease: str = "sandbox"
    ) -> ExecResult:
        """See `protocols.Sandbox`; `lease` as in `LeasedStreams`."""
        ...

    def start(self, command: str, *, lease: str = "sandbox") -> LiveProcess:
        """See `LeasedStreams`."""
        ...


# --------------------------------------------------------------------------------------------------- of verifiers


@runtime_checkable
class JudgesArtifacts(Protocol):
    """A verifier that looks at files: they are copied into a fresh sandbox, and nothing else of the agent's is."""

    @property
    def artifacts(self) -> Sequence[str]:
        """Absolute paths in the agent's sandbox."""
        ...


@runtime_checkable
class TakesTime(Protocol):
    """A verifier for which a minute is too short."""

    @property
    def timeout_s(self) -> float:
        """Wall time of one score."""
        ...


@runtime_checkable
class Paid(Protocol):
    """A verifier that costs something: it is asked last, and not at all where the others have decided."""

    @property
    def paid(self) -> bool: ...


@runtime_checkable
class Waits(Protocol):
    """A verifier whose number comes from outside, later."""

    @property
    def waits(self) -> bool: ...


def artifacts_of(verifier: Verifier | GroupVerifier) -> Sequence[str]:
    """Paths that `verifier` judges; none for one that reads the trace alone."""
    if isinstance(verifier, JudgesArtifacts):
        return verifier.artifacts
    return ()


def time_of(verifier: Verifier | GroupVerifier, default_s: float) -> float:
    """Seconds that one score of `verifier` may take."""
    if isinstance(verifier, TakesTime):
        return verifier.timeout_s
    return default_s


def is_paid(verifier: Verifier | GroupVerifier) -> bool:
    """True where a score of `verifier` costs something."""
    return isinstance(verifier, Paid) and verifier.paid


def waits(verifier: Verifier | GroupVerifier) -> bool:
    """True where the number of `verifier` comes later, from outside."""
    return isinstance(verifier, Waits) and verifier.waits


# ------------------------------------------------------------------------------------------------------ of agents


@runtime_checkable
class BringsFiles(Protocol):
    """An agent with a folder that its sandboxes show read-only at /agent."""

    @property
    def files(self) -> Path | None: ...


@runtime_checkable
class RunsProgram(Protocol):
    """An agent that is a program with tools of its own, whose results are known as the model was sent them."""

    @property
    def program(self) -> bool: ...


@runtime_checkable
class OnHost(Protocol):
    """An agent that acts on this machine and needs no sandbox: it can read the suite, its answers included."""

    @property
    def on_host(self) -> bool: ...


@runtime_checkable
class Preflight(Protocol):
    """An agent that can see before its first attempt whether any attempt can succeed."""

    async def preflight(self) -> None:
        """Raises ConfigError where none can, with the next move."""
        ...


@runtime_checkable
class Rewrites(Protocol):
    """A policy whose model reads other text than the agent wrote."""

    def received(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """`messages` as the model reads them."""
        ...


def received(policy: object, messages: Sequence[Message]) -> tuple[Message, ...]:
    """`messages` as the model of `policy` reads them."""
    if isinstance(policy, Rewrites):
        return policy.received(messages)
    return tuple(messages)


async def preflight(agent: object) -> None:
    """Ask `agent` whether it can act, where it can tell. Raises ConfigError."""
    if isinstance(agent, Preflight):
        await agent.preflight()


def runs_program(agent: object) -> bool:
    """True for a program with tools of its own."""
    return isinstance(agent, RunsProgram) and agent.program


def is_on_host(agent: object) -> bool:
    """True for an agent that acts on this machine."""
    return isinstance(agent, OnHost) and agent.on_host


def with_files(spec: SandboxSpec, agent: object) -> SandboxSpec:
    """The sandbox with the folder that `agent` brings."""
    if not isinstance(agent, BringsFiles) or agent.files is None:
        return spec
    return spec.model_copy(update={"agent_files": agent.files})


# -------------------------------------------------------------------------------------------------- of experience


@runtime_checkable
class Forks(Protocol):
    """Experience whose attempts can be continued from one of their steps."""

    async def fork(self, attempt: Attempt, step: int) -> Task | None:
        """The task of `attempt` as it stands before that step; None where its state cannot be made again."""
        ...


@runtime_checkable
class Vets(Protocol):
    """Experience that has the whole suite and the secrets, which a trainer has not."""

    def leak(self, text: str, own: str = "") -> str | None:
        """The reason for which `text` must not be part of a version, in a few words; None for a text that may.

        own: texts that the agent has anyway, which give nothing away.
        """
        ...

    def redacted(self, text: str) -> str:
        """`text` without secrets, as it may leave this machine."""
        ...


@runtime_checkable
class HearsPeople(Protocol):
    """Experience that has what people wrote about traces."""

    def words_of_people(self, trace: Trace) -> Sequence[str]:
        """Texts of feedback on `trace`, the oldest first; none that its own agent sent."""
        ...


def words_of_people(experience: object, trace: Trace) -> Sequence[str]:
    """What people wrote about `trace`, as far as `experience` has it."""
    if isinstance(experience, HearsPeople):
        return experience.words_of_people(trace)
    return ()


@runtime_checkable
class ShowsTexts(Protocol):
    """Experience that has the texts that the agent reads, where its traces do not show them."""

    async def texts(self) -> Sequence[Component]:
        """Instructions and tool descriptions, each with an `original` equal to its `text`."""
        ...


@runtime_checkable
class ShowsTools(Protocol):
    """Experience that has the tools that the agent is offered, where its traces do not show them."""

    async def tools(self) -> Sequence[ToolSpec] | None:
        """None where the agent asked nothing, so that they are unknown."""
        ...


# ----------------------------------------------------------------------------------------------------- of trainers


@runtime_checkable
class Rehearses(Protocol):
    """A trainer that can show what it would begin with."""

    async def rehearse(self, parent: PolicyVersion, draft: Draft, experience: Experience) -> Rehearsal:
        """The same as `protocols.Trainer.improve`, up to where a model is asked."""
        ...


# --------------------------------------------------------------------------------------------------- of exporters


@runtime_checkable
class CountsExcluded(Protocol):
    """An exporter that leaves out a part of the traces, and says why."""

    excluded: Counter[str]
    """Reason -> what was left out by it, of all traces that were written."""
