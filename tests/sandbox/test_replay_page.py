"""The program of sandboxes/replay.md is run as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentloop.sandbox.bubblewrap import BubblewrapBackend

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "sandboxes" / "replay.md"


def test_the_program_of_the_page_records_and_replays(bubblewrap: BubblewrapBackend, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    same, mismatch = done.stdout.splitlines()
    assert same == "True"
    assert "went another way at seq 2" in mismatch
    assert "rm note" in mismatch
    lines = (tmp_path / "recording/episode-1.jsonl").read_text().splitlines()
    assert len(lines) == 4, "the sandbox, what was written, the command, the end"
