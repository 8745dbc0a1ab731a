"""What a bubblewrap box may write to, where its files are counted too: bwrap's own tmpfs knows only sizes.

The tmpfs are mounted in a mount namespace that bwrap is started in and that nobody else sees, so
the kernel removes them with the box.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

from agentloop.errors import CapabilityError
from agentloop.types import SandboxSpec

PLACES = {"tmp": "/tmp", "shm": "/dev/shm", "work": "/work"}  # noqa: S108 - the box's own
ROOT = "root"
"""Beside those, for a root file system that can be written: what is written, and overlayfs' own folder."""
PROGRAMS = ("unshare", "mount", "mkdir")
REFUSED = "agentloop cannot mount"
"""Written by the shell that should have mounted them; bwrap was not started."""


def is_needed(spec: SandboxSpec) -> bool:
    """Whether bwrap's own tmpfs do not hold what `spec` asks for."""
    return spec.scratch_files is not None or (spec.root and "scratch_mb" in spec.model_fields_set)


def wrapped(command: list[str], spec: SandboxSpec, folder: Path) -> list[str]:
    """`command` where a tmpfs is mounted at `folder`/NAME for each of PLACES and ROOT. Raises CapabilityError."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise refused(f"no program {missing[0]}")
    options = f"nosuid,nodev,mode=1777,size={spec.scratch_mb}m"
    if spec.scratch_files is not None:
        options += f",nr_inodes={spec.scratch_files + 1}"  # its own root counts
    mounts = [f"mount -t tmpfs -o {options} agentloop {shlex.quote(str(folder / name))}" for name in PLACES]
    if spec.root:
        # Its folder, and the two that overlayfs needs with one more inside, are not the box's.
        own = options if spec.scratch_files is None else f"{options.rpartition('=')[0]}={spec.scratch_files + 4}"
        place = shlex.quote(str(folder / ROOT))
        mounts += [f"mount -t tmpfs -o {own} agentloop {place} && mkdir {place}/upper {place}/work"]
    for name in (*PLACES, ROOT):
        (folder / name).mkdir(parents=True)
    user = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    text = f'{" && ".join(mounts)} || {{ echo {shlex.quote(REFUSED)} >&2; exit 1; }}; exec "$@"'
    return ["unshare", *user, "--mount", "/bin/sh", "-c", text, "sh", *command]


def shown(name: str, spec: SandboxSpec, folder: Path | None) -> list[str]:
    """bwrap's arguments for one of PLACES: what was mounted at `folder`, or else a tmpfs of bwrap's."""
    if folder is not None:
        return ["--bind", str(folder / name), PLACES[name]]
    return ["--size", str(spec.scratch_mb << 20), "--perms", "1777", "--tmpfs", PLACES[name]]


def overlay(folder: Path | None) -> list[str]:
    """bwrap's arguments for what is written to a root file system."""
    if folder is None:
        return ["--tmp-overlay", "/"]
    return ["--overlay", str(folder / ROOT / "upper"), str(folder / ROOT / "work"), "/"]


def refused(said: str) -> CapabilityError:
    """With what the programs said about it."""
    reason = " ".join(said.replace(REFUSED, "").split())
    return CapabilityError(f"bubblewrap cannot bound the scratch folders here: {reason}; use docker")
