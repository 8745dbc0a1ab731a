"""Real traces of other programs, where a folder of them is present: every quoted failure is marked behind its link."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "page_evidence.py"
FOLDER = os.environ.get("AGENTLOOP_TRACES", "")


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="no real traces here. Remedy: AGENTLOOP_TRACES=a folder of files of traces")
def test_every_quote_of_real_traces_has_its_mark_behind_its_link() -> None:
    done = subprocess.run([sys.executable, PROGRAM, FOLDER], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout
