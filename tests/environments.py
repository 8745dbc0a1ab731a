"""Environments for what cannot be installed beside the rest of our development tools: made once, and cached."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp

from parts import lacking

PYTHON = Path("bin", "python")


def need(*modules: str) -> None:
    """Skip the test where one of the packages is missing; in CI that is a failure."""
    try:
        missing = [name for name in modules if find_spec(name) is None]
    except ModuleNotFoundError as error:  # of the package around it
        missing = [str(error.name)]
    if missing:
        lacking(f"{', '.join(missing)} not installed. Remedy: pip install '.[dev]'")


def python_with(packages: Sequence[str]) -> Path:
    """A Python that has exactly `packages`, and for everything else what this one has.

    Kept in the environment that runs the tests, under the first package's name, until that one is made anew.
    """

    def make(folder: Path) -> None:
        _install(folder, packages, packages[0])
        (site,) = folder.glob("lib/python*/site-packages")
        ours = [path for path in sys.path if path.endswith("site-packages")]
        (site / "ours.pth").write_text("\n".join(ours))

    name = f"{packages[0]}-{_hash(' '.join(packages))}"
    return made_whole(Path(sys.prefix, "environments", name), make) / PYTHON


def python_of(requirements: Path) -> Path:
    """A Python that has what the file says, each package as it stands there, and nothing else.

    Kept in the user's cache, because it is large, under the name of the file's folder.
    """
    name = f"{requirements.parent.name}-{_hash(requirements.read_text() + sys.version)}"
    folder = cache() / "environments" / name
    return made_whole(folder, lambda made: _install(made, ["-r", str(requirements)], requirements.name)) / PYTHON


def python_resolved(name: str, requirements: Sequence[str], constraints: Path) -> Path:
    """A Python with `requirements` and what they need, as pip resolves them under `constraints`, and nothing else.

    Kept in the user's cache, as `name`, until a requirement or a constraint changes.
    """
    key = _hash(" ".join(requirements) + constraints.read_text() + sys.version)
    packages = ["--constraint", str(constraints), *requirements]
    folder = cache() / "environments" / f"{name}-{key}"
    return made_whole(folder, lambda made: _install(made, packages, f"extra {name!r}", resolve=True)) / PYTHON


def python_of_newer(minimum: tuple[int, int], requirements: Path) -> Path:
    """Another Python of this machine, `minimum` or newer, with what the file says and what that needs.

    Kept in the user's cache, under the name of the file's folder. Skips where there is no such Python.
    """
    program = _newer(minimum)
    if program is None:
        lacking(f"no Python {'.'.join(map(str, minimum))} or newer on PATH. Remedy: install one, such as `python3.13`")

    def make(folder: Path) -> None:
        subprocess.run([program, "-m", "venv", folder], check=True, capture_output=True)
        pip = [str(folder / PYTHON), "-m", "pip", "install", "--quiet", "-r", str(requirements)]
        done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=900)
        if done.returncode != 0:
            lacking(f"{requirements} cannot be installed: {done.stderr.strip().splitlines()[-1]}")

    name = f"{requirements.parent.name}-{_hash(requirements.read_text() + program)}"
    return made_whole(cache() / "environments" / name, make) / PYTHON


def _newer(minimum: tuple[int, int]) -> str | None:
    """The path of the first interpreter that runs and is new enough."""
    ask = f"import sys; sys.exit(sys.version_info < {minimum})"
    for name in (sys.executable, *(f"python3.{minor}" for minor in range(minimum[1], minimum[1] + 6))):
        program = shutil.which(name)
        if program and subprocess.run([program, "-c", ask], capture_output=True, check=False).returncode == 0:
            return program
    return None


def cache() -> Path:
    """Our folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentloop"


def made_whole(folder: Path, make: Callable[[Path], object]) -> Path:
    """`folder`, filled by `make` if it is not there: beside its place, and moved whole: two workers may want it."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(mkdtemp(dir=folder.parent))
        try:
            make(made)
            made.rename(folder)
        except OSError:
            assert folder.exists()  # the other worker's
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def _install(folder: Path, packages: Sequence[str], what: str, *, resolve: bool = False) -> None:
    """resolve: also install what the packages need, and fail, not skip, where their versions contradict each other."""
    venv.create(folder, with_pip=False, symlinks=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / PYTHON),
        "install",
        "--quiet",
        "--no-compile",
    ]  # few of its modules are imported
    pip += [] if resolve else ["--no-deps"]
    done = subprocess.run([*pip, *packages], capture_output=True, text=True, check=False, timeout=900)
    assert "ResolutionImpossible" not in done.stderr, done.stderr
    if done.returncode != 0:
        lacking(f"{what} cannot be installed: {done.stderr.strip().splitlines()[-1]}")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
