"""The main job: a policy made from scratch gets better at using tools, and is proven to be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentloop.demo.project import prepare_demo
from agentloop.demo.template import prepare_template
from agentloop.sandbox.bubblewrap import BubblewrapBackend

pytestmark = pytest.mark.slow


def loop(folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "agentloop_cli", "loop", str(folder), "--sandbox", "bubblewrap", "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_the_demo_learns(tmp_path: Path, bubblewrap: BubblewrapBackend) -> None:
    """Two turns of it, which is a third of the whole; `benchmarks/demo.py` measures all of it on fresh seeds."""
    prepare_demo(tmp_path / "demo", 9)
    with (tmp_path / "demo" / "agentloop.toml").open("a") as settings:
        settings.write("\n[train]\nmax_turns = 2\n\n[gate]\ntrials = 2\n")
    document = loop(tmp_path / "demo")
    before, after = document["heldout"]["before"]["success"], document["heldout"]["after"]["success"]
    assert before <= 0.45
    assert after >= 0.65, "it starts near 0.3 and reaches 0.8 to 0.95 in two turns"
    assert document["decision"] == "promote"
    assert document["versions"][1]["p_better"] < 0.05
    assert (
        document["failures"]["before"]["call.wrong_arguments"] > document["failures"]["after"]["call.wrong_arguments"]
    )
    assert document["infra_failed"] == 0
    assert document["regression_cases"] > 50
    assert Path(document["report"]).read_text().count("<svg") >= 2
    assert loop(tmp_path / "demo")["versions"] == document["versions"], "a finished loop has nothing left to do"


def test_what_init_makes_learns_from_its_solutions(tmp_path: Path, bubblewrap: BubblewrapBackend) -> None:
    prepare_template(tmp_path / "notes")
    settings = tmp_path / "notes" / "agentloop.toml"
    settings.write_text(settings.read_text().replace("max_turns = 2", "max_turns = 1"))
    document = loop(tmp_path / "notes")
    assert document["heldout"]["after"]["success"] >= 0.7
    assert [version["number"] for version in document["versions"]] == [1, 2]
