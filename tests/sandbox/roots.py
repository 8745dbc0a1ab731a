"""Root file systems for tests, made of what this machine has: nothing is pulled."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

from parts import lacking

from agentloop.sandbox import host

BUSYBOX = Path("/bin/busybox")
NOT_NEEDED = ("site-packages", "__pycache__", "test", "tests", "idlelib", "ensurepip", "tkinter", "lib2to3")


def python_root(root: Path) -> Path:
    """The host's python3 and shell with the libraries they need, and busybox's programs where it is installed."""
    for name in ("bin", "proc", "dev", "sys", "etc", "run", "tmp", "work"):
        (root / name).mkdir(parents=True)
    for path in ["/bin/sh", host.python(), *_libraries()]:
        _copy(path, root)
    library = os.path.dirname(os.__file__)
    shutil.copytree(
        library, root / library[1:], symlinks=True, ignore=shutil.ignore_patterns(*NOT_NEEDED, "config-*", "*.a")
    )
    (root / "bin/python3").symlink_to(host.python())
    for program in ("cat", "chmod", "cp", "head", "id", "ls", "mkdir", "mv", "rm", "sleep", "tar", "touch", "true"):
        _copy_as(f"/bin/{program}", root, f"bin/{program}")
    return root


def busybox_root(root: Path) -> Path:
    """A shell and the usual programs in 2 MB, and no Python; skips where busybox is not linked statically."""
    if not BUSYBOX.exists() or b"not a dynamic" not in _ldd(str(BUSYBOX)):
        lacking("no static busybox. Remedy: `apt install busybox-static`")
    for name in ("bin", "proc", "dev", "sys", "etc", "run", "tmp", "work"):
        (root / name).mkdir(parents=True)
    shutil.copy(BUSYBOX, root / "bin/busybox")
    listed = subprocess.run([BUSYBOX, "--list"], capture_output=True, text=True, check=True)
    for name in listed.stdout.split():
        if name != "busybox":
            (root / "bin" / name).symlink_to("busybox")
    return root


def with_libraries_of(packages: Path, root: Path) -> Path:
    """`root` with the host's libraries that compiled modules below `packages` need."""
    said = _ldd(*map(str, packages.rglob("*.so"))).decode()
    for path in sorted(set(re.findall(r"=> (/\S+) \(0x", said))):
        if not Path(path).is_relative_to(packages):
            _copy(path, root)
    return root


def packed(root: Path, to: Path) -> Path:
    """A tar of a root folder; compressed when its name says so."""
    with tarfile.open(to, "w:gz" if to.suffix in (".gz", ".tgz") else "w") as archive:
        archive.add(root, arcname=".")
    return to


def _libraries() -> set[str]:
    """Shared libraries of the shell, the programs and the interpreter, as the linker names them."""
    modules = [str(p) for p in Path(os.path.dirname(os.__file__), "lib-dynload").glob("*.so")]
    said = _ldd("/bin/sh", "/bin/ls", "/bin/tar", "/bin/cp", host.python(), *modules).decode()
    return set(re.findall(r"(/\S+) \(0x", said))


def _ldd(*paths: str) -> bytes:
    done = subprocess.run(["ldd", *paths], capture_output=True, check=False)
    return done.stdout + done.stderr


def _copy(path: str, root: Path) -> None:
    _copy_as(path, root, path[1:])


def _copy_as(path: str, root: Path, name: str) -> None:
    target = root / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy(os.path.realpath(path), target)
