"""`agentloop bank --tape` and `agentloop gate`: who has not changed is gated at no cost, and who has is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Run
from .test_gate import N, lay

pytestmark = [pytest.mark.usefixtures("bubblewrap"), pytest.mark.slow]
BANK = ("bank", "evals/read", "--as", "main", "--trials", "4", "--sandbox", "bubblewrap")


def gate(candidate: str, out: str, *more: str) -> tuple[str, ...]:
    named = ("evals/read", "--baseline", "main", "--candidate", f"scripted:p.py:{candidate}")
    return ("gate", *named, "--sandbox", "bubblewrap", "--out", out, "--delta", "0.3", "--json", *more)


def test_an_unchanged_policy_is_played_and_a_changed_one_is_not(tmp_path: Path, agentloop: Run) -> None:
    suite = lay(tmp_path)
    done = agentloop(*BANK, "--policy", "scripted:p.py:good", "--tape")
    assert done.returncode == 0, done.stderr
    assert len((suite / "baseline" / "main.tape.jsonl").read_text().splitlines()) > N * 4

    done = agentloop(*gate("good", "same"))
    result = json.loads(done.stdout)
    assert (done.returncode, result["verdict"]) == (0, "PASS"), done.stderr
    assert result["n_played"] == result["n_candidate"] > 0
    assert result["cost_usd"] == 0
    assert {look["mean"] for look in result["suites"][0]["looks"]} == {0.0}  # each against its own banked trial
    assert result["settings"]["per_visit"] == 1

    asked = json.loads(agentloop(*gate("good", "asked", "--tape", "off")).stdout)
    assert (asked["verdict"], asked["n_played"], asked["settings"]["per_visit"]) == ("PASS", 0, None)
    other = json.loads(agentloop(*gate("breaks", "other")).stdout)
    assert (other["verdict"], other["n_played"]) == ("FAIL", 0)

    done = agentloop(*gate("good", "never", "--sampling", "importance"))
    assert done.returncode == 2
    assert "--tape off" in done.stderr


def test_harbor_tasks_have_no_tape(tmp_path: Path, agentloop: Run) -> None:
    from harbor.folders import make_task

    make_task(tmp_path / "tasks" / "one", toml="", test="#!/bin/sh\n", solve="#!/bin/sh\n")
    done = agentloop("bank", "tasks", "--policy", "oracle", "--as", "main", "--tape")
    assert done.returncode == 2, done.stderr
    assert "Harbor tasks have none" in done.stderr
