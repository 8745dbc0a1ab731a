"""`agentloop` as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def agentloop(tmp_path: Path) -> Run:
    """Runs the command in an empty folder: `agentloop("traces", "ls", env={...})`."""

    def run(*arguments: str | Path, env: dict[str, str] | None = None, **more: object) -> object:
        return subprocess.run(
            [Path(sys.executable).with_name("agentloop"), *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "80", **(env or {})},
            **{"capture_output": True, "text": True, "check": False, "timeout": 60, **more},  # type: ignore[call-overload]
        )

    return run  # type: ignore[return-value]
