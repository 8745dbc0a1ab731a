"""A running box, and one episode's lease of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

from agentloop.abilities import LeasedStreams, LiveProcess
from agentloop.errors import CapabilityError, SandboxGone
from agentloop.protocols import Sandbox
from agentloop.sandbox import files
from agentloop.sandbox.archives import Manifest
from agentloop.sandbox.cgroups import Watch
from agentloop.sandbox.channel import SandboxConnection
from agentloop.sandbox.egress import Egress
from agentloop.sandbox.inside.frames import CONTROL, TERMINAL
from agentloop.sandbox.process import Process
from agentloop.sandbox.session import SHELL, ShellSession
from agentloop.types import ExecResult


@runtime_checkable
class SharedBox(Sandbox, Protocol):
    """A sandbox that several episodes may use at once, each under a lease's name."""

    @property
    def gone(self) -> bool:
        """True once nothing can run in it any more."""
        ...

    async def exec(
        self, command: str, *, timeout_s: float = 30.0, max_output: int = 16_384, lease: str = "box"
    ) -> ExecResult:
        """See `protocols.Sandbox`; `lease` names the scratch folder."""
        ...

    def discard(self, lease: str) -> None:
        """Remove a lease's processes and scratch folder; harmless for a box that is gone."""
        ...


class Box:
    """A box that was created: `close` ends every process in it and removes what it had on the host.

    Beyond `exec`, a box has processes with streams, terminals and shells that stay, files in and out,
    and a way to the outside that can be opened and closed.
    """

    def __init__(
        self,
        box_id: str,
        isolation: str,
        connection: SandboxConnection,
        end: Callable[[], None],
        *,
        watch: Watch | None = None,
        egress: Egress | None = None,
    ) -> None:
        """end: blocks until the box's processes are gone; called once, in a thread.

        watch: what the kernel counts against it. egress: what its proxy allows.
        """
        self.id, self.isolation = box_id, isolation
        self._connection, self._end = connection, end
        self._watch, self._egress = watch, egress or Egress()
        if watch:
            connection.cause = watch.cause
        self._listens = False
        self._listen()
        self._closing: asyncio.Future[None] | None = None

    @property
    def gone(self) -> bool:
        """See `SharedBox`."""
        return self._connection.gone is not None

    async def exec(
        self, command: str, *, timeout_s: float = 30.0, max_output: int = 16_384, lease: str = "box"
    ) -> ExecResult:
        """See `SharedBox`."""
        before = self._watch.kills() if self._watch else 0
        done = await self._connection.exec(command, lease=lease, timeout_s=timeout_s, max_output=max_output)
        if self._watch is None:
            return done
        self._watch.mark()
        return done.model_copy(update={"oom": True}) if self._watch.kills() > before else done

    def start(self, command: str, *, lease: str = "box") -> Process:
        """Run `command` and go on: its input and outputs are channels. Raises SandboxGone."""
        return self._connection.start(command, lease=lease)

    def terminal(self, command: str, *, rows: int = 24, columns: int = 80) -> Process:
        """Run `command` in a terminal: what it shows is on `stdout`, what is typed goes to `stdin`."""
        return self._connection.start(command, lease="box", how=TERMINAL, size=(rows, columns))

    def session(self) -> ShellSession:
        """A shell whose folder, variables and jobs live from one command to the next."""
        return ShellSession(lambda: self._connection.start(SHELL, lease="box", how=CONTROL))

    async def read(self, path: str, *, max_bytes: int = files.MAX_BYTES) -> bytes:
        """The bytes of one file of the box. Raises PathError, TransferLimit."""
        return await files.read_file(self.start, path, max_bytes)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Create or replace one file of the box. Raises PathError."""
        await files.write_file(self.start, path, data, mode)

    async def upload(self, source: Path, target: str) -> None:
        """Copy a folder's contents, or a file, into the folder `target` of the box. Raises PathError."""
        await files.upload(self.start, source, target)

    async def download(
        self,
        path: str,
        target: Path,
        *,
        max_bytes: int = files.MAX_BYTES,
        max_entries: int = files.MAX_ENTRIES,
    ) -> Manifest:
        """Copy a file or folder of the box to the new path `target`. Raises PathError, TransferLimit."""
        return await files.download(self.start, path, target, max_bytes=max_bytes, max_entries=max_entries)

    def set_network(self, allowed_hosts: tuple[str, ...]) -> None:
        """From now on the proxy connects to these hosts alone; connections to others are cut.

        Raises CapabilityError where the box's first process cannot lead to a proxy.
        """
        self._egress.allow(allowed_hosts)
        self._listen()

    def set_gateway(self, gateway: Path | None) -> None:
        """From now on `http://127.0.0.1:3128/` is, in the box, what listens at this unix socket of the host; or nobody.

        Connections to the one before are cut. Raises CapabilityError where the box's first process leads to nothing.
        """
        self._egress.lead(gateway)
        self._listen()

    def _listen(self) -> None:
        if self._egress.allows and not self._listens:
            self._connection.listen(self._egress.serve)
            self._listens = True

    def discard(self, lease: str) -> None:
        """See `SharedBox`."""
        self._connection.discard(lease)

    def kill_all(self) -> None:
        """End every process but the first; the files stay."""
        self._connection.discard("")

    async def close(self) -> None:
        """See `protocols.Sandbox`; whoever closes second waits for the same end."""
        if self._closing is None:
            self._connection.close()
            self._closing = asyncio.ensure_future(asyncio.to_thread(self._end))
        await asyncio.shield(self._closing)


class Lease:
    """One episode's share of a box that several use."""

    def __init__(self, box: SharedBox, name: str) -> None:
        """name: becomes the scratch folder's, with what does not belong in a file name replaced."""
        self._box, self._name = box, re.sub(r"[^A-Za-z0-9_-]", "_", name)[:200]
        self.id, self.isolation = f"{box.id}/{self._name[:8]}", box.isolation
        self._closed = False

    async def exec(self, command: str, *, timeout_s: float = 30.0, max_output: int = 16_384) -> ExecResult:
        """See `protocols.Sandbox`."""
        if self._closed:
            raise SandboxGone(f"the sandbox is gone: the lease {self.id} was closed")
        return await self._box.exec(command, timeout_s=timeout_s, max_output=max_output, lease=self._name)

    def start(self, command: str) -> LiveProcess:
        """See `Box`. Raises CapabilityError where boxes of this kind have no streams."""
        if self._closed:
            raise SandboxGone(f"the sandbox is gone: the lease {self.id} was closed")
        if not isinstance(self._box, LeasedStreams):
            raise CapabilityError("this box keeps no program running beside its commands; use docker or bubblewrap")
        return self._box.start(command, lease=self._name)

    async def close(self) -> None:
        """Discard the scratch folder and what still runs; the box stays."""
        if not self._closed:
            self._closed = True
            self._box.discard(self._name)
