"""Environments for what cannot be installed beside the rest of our development tools: made once, and cached."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp

from parts import lacking


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
    all_of_them = hashlib.sha256(" ".join(packages).encode()).hexdigest()
    folder = Path(sys.prefix, "environments", f"{packages[0]}-{all_of_them[:8]}")
    python = Path("bin", "python")
    if not folder.exists():
        # Made beside its place and moved there whole: two workers may want it at once.
        folder.parent.mkdir(exist_ok=True)
        made = Path(mkdtemp(dir=folder.parent))
        venv.create(made, with_pip=False, symlinks=True)
        (site,) = made.glob("lib/python*/site-packages")
        ours = [path for path in sys.path if path.endswith("site-packages")]
        (site / "ours.pth").write_text("\n".join(ours))
        pip = [sys.executable, "-m", "pip", "--python", str(made / python), "install", "--quiet", "--no-deps"]
        done = subprocess.run([*pip, *packages], capture_output=True, text=True, check=False, timeout=500)
        try:
            if done.returncode != 0:
                lacking(f"{packages[0]} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
            made.rename(folder)
        except OSError:
            assert folder.exists()  # the other worker's
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder / python
