"""`agentloop` as a user starts it: as a process, or, for the many short ones, its entry point in this process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from agentloop_cli.main import main

COMMAND = Path(sys.executable).with_name("agentloop")
Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]


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


@pytest.fixture
def agentloop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The same without the process: a second of imports less for each. Nothing is replaced but the streams."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["agentloop", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(sys.argv, int(ended.value.code or 0), *capsys.readouterr())

    return run
