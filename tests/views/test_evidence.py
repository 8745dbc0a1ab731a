"""Real traces of other programs, where a folder of them is present: every quoted failure is marked behind its link."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from formats.samples import SHARED

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "page_evidence.py"


@pytest.mark.slow
@pytest.mark.skipif(
    not SHARED.is_dir(), reason="no real traces here. Remedy: AGENTLOOP_SHARED=a folder with data/traces"
)
def test_every_quote_of_real_traces_has_its_mark_behind_its_link() -> None:
    done = subprocess.run([sys.executable, PROGRAM, SHARED], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout
