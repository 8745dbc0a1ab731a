"""`agentloop run` as a user starts it: several trials of a task, and folders that cannot be written to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from parts import Run
from sandbox.roots import busybox_root

from agentloop.sandbox.bubblewrap import BubblewrapBackend

from .folders import make_task

COIN = "#!/bin/sh\necho $(( $(od -An -N2 -tu2 /dev/urandom) % 2 )) > /logs/verifier/reward.txt\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return busybox_root(tmp_path / "root")


@pytest.mark.slow
def test_several_trials_have_a_mean_and_each(
    agentloop: Run, bubblewrap: BubblewrapBackend, root: Path, tmp_path: Path
) -> None:
    make_task(tmp_path / "tasks/coin", toml="", test=COIN, image=root)
    make_task(tmp_path / "tasks/sure", toml="", image=root)
    make_task(tmp_path / "tasks/void", toml="", test="#!/bin/sh\n", image=root)
    arguments = ("run", tmp_path / "tasks", "--agent", "nop", "--sandbox", "bubblewrap", "--trials", "6")
    done = agentloop(*arguments, "--out", tmp_path / "out", "--json")
    assert done.returncode == 4, done.stderr
    told = json.loads(done.stdout)
    assert (told["n_tasks"], told["n_trials"], told["n_scored"]) == (3, 18, 12)
    coin_, sure, void = told["tasks"]
    assert [trial["reward"] for trial in told["trials"]] == [r for t in (coin_, sure, void) for r in t["rewards"]]
    assert (sure["rewards"], sure["mean_reward"]) == ([0.0] * 6, 0.0)
    assert (void["rewards"], void["mean_reward"]) == ([None] * 6, None)
    assert coin_["mean_reward"] == pytest.approx(sum(coin_["rewards"]) / 6)
    assert told["mean_reward"] == pytest.approx((coin_["mean_reward"] + 0.0) / 2)
    assert len({trial["trace"] for trial in told["trials"]}) == 18
    listed = json.loads(agentloop("traces", "ls", "--project", tmp_path / "out", "--json").stdout)
    assert len(listed["traces"]) == 18
    shown = agentloop(*arguments[:-1], "2", "--out", tmp_path / "again").stdout
    assert "4 of 6 attempts at 3 tasks scored, mean reward" in shown
    assert "0 0" in shown
    assert "- -" in shown


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/nothing"])
def test_a_folder_that_cannot_be_is_one_line_before_anything_runs(
    agentloop: Run, bubblewrap: BubblewrapBackend, root: Path, tmp_path: Path, out: str
) -> None:
    task = make_task(tmp_path / "t", toml="", image=root)
    (tmp_path / "file").touch()
    done = agentloop("run", task, "--agent", "nop", "--sandbox", "bubblewrap", "--out", tmp_path / out)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: --out {tmp_path / out}: no folder can be made there (")


@pytest.mark.parametrize("command", ["", "run", "sandbox gc"])
def test_help_has_a_short_name_everywhere(agentloop: Run, command: str) -> None:
    short, long = (agentloop(*command.split(), option) for option in ("-h", "--help"))
    assert short.returncode == 0
    assert short.stdout == long.stdout
    assert "Usage: agentloop" in short.stdout
