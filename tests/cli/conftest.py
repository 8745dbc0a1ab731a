"""`agentloop` as a user starts it: as a process. The many short ones use the fixture `agentloop` instead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from parts import Done, Run

__all__ = ["COMMAND", "Done", "Run"]
COMMAND = Path(sys.executable).with_name("agentloop")


@pytest.fixture
def process(tmp_path: Path) -> Run:
    """Runs the installed command in an empty folder: `process("traces", "ls", env={...})`."""

    def run(*arguments: str | Path, env: dict[str, str] | None = None) -> Done:
        return subprocess.run(
            [COMMAND, *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "80", **(env or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run
