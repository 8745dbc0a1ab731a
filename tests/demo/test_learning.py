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


def make_notes(folder: Path, *edits: tuple[str, str]) -> Path:
    """What `init` makes, for one turn, with `edits` of its settings."""
    prepare_template(folder)
    text = (folder / "agentloop.toml").read_text()
    for old, new in (("max_turns = 2", "max_turns = 1"), *edits):
        assert old in text
        text = text.replace(old, new)
    (folder / "agentloop.toml").write_text(text)
    return folder


def test_what_init_makes_starts_half_wrong_and_rises(tmp_path: Path, bubblewrap: BubblewrapBackend) -> None:
    document = loop(make_notes(tmp_path / "notes"))
    before, after = document["heldout"]["before"]["success"], document["heldout"]["after"]["success"]
    assert 0.2 <= before <= 0.75, "it starts at 0.4 to 0.6"
    assert after >= before + 0.1, "it reaches 0.75 to 0.9 in one turn"
    assert [version["decision"] for version in document["versions"]] == [None, "promote"]


def test_without_its_demonstrator_it_learns_from_the_solutions(tmp_path: Path, bubblewrap: BubblewrapBackend) -> None:
    """As the comments of its settings advise for tasks of one's own; the turn is cut short."""
    named = 'demonstrator = "demonstrator.py:make"\n'
    document = loop(make_notes(tmp_path / "notes", (named, ""), ("max_turns = 1", "max_turns = 1\nsteps_per_turn = 1")))
    assert document["heldout"]["before"]["success"] >= 0.8, "nothing of what it was shown was wrong"
