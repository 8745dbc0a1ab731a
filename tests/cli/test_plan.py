"""`agentloop plan`, `execute` and `collect` together make what `agentloop run` makes, whatever is killed in between."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from loop.mini import make_mini, opened
from loop.test_acting_again import done
from parts import Run

from agentloop.loop.fixed import FixedTrainer
from agentloop.loop.new_version import first_version
from agentloop.store.bodies import unpack

from .conftest import COMMAND

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("bubblewrap")]

N_TASKS, TRIALS, N_SHARDS = 6, 2, 3
N_UNITS = N_TASKS * TRIALS
POLICY = """
import os
from agentloop.policies.scripted import ScriptedPolicy, call_message


def of_chance(tasks):
    def script(messages, rng):
        if messages[-1].role != "tool":
            return call_message("shell", command=f"echo {rng.randrange(10**6)} $KEY; cat q*")
        right = 100 + int(messages[0].content.strip("?").rpartition("q")[2])
        return call_message("submit", answer=str(right + rng.randrange(2)))

    return ScriptedPolicy(script, name="of_chance")


def slow(tasks):
    def script(messages, rng):
        if messages[-1].role == "tool":
            return call_message("submit", answer="100")
        with open(os.environ["BEGUN"], "a") as file:
            print(messages[0].content, rng.randrange(10**6), file=file)
        return call_message("shell", command="sleep 0.3")

    return ScriptedPolicy(script, name="slow")


def leaks(tasks):
    def script(messages, rng):
        return call_message("submit", answer=os.environ["AGENTLOOP_POLICY__API_KEY"])

    return ScriptedPolicy(script, name="leaks")
"""
BY = ("--policy", "scripted:policy.py:of_chance", "--sandbox", "bubblewrap")
TIMES = {"started_at", "duration_s"}


def made(folder: Path) -> Path:
    make_mini(folder, n_train=2, n_heldout=N_TASKS - 2)
    (folder / "policy.py").write_text(POLICY)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return made(tmp_path / "p")


def planned(agentloop: Run, *words: str, out: str = "plan", shards: int = N_SHARDS, trials: int = TRIALS) -> Any:
    sizes = ("--shards", str(shards), "--trials", str(trials))
    ended = agentloop("plan", "p/evals/mini", *(words or BY), "--out", out, *sizes, "-p", "p", "--json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def read(plan: Path) -> Any:
    return json.loads((plan / "agentloop-plan.json").read_text())


def one_line(text: str) -> str:
    return " ".join(text.split())


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def attempts_in(project: Path) -> dict[tuple[str, int], Any]:
    """(stage, position) -> the attempt with everything but its times."""
    with closing(sqlite3.connect(project / "traces" / "store.db")) as database:
        rows = database.execute("SELECT stage, n, body FROM trace WHERE stage IS NOT NULL").fetchall()
    assert len({(stage, n) for stage, n, _ in rows}) == len(rows)
    return {(stage, n): [without_times(one.model_dump(mode="json")) for one in unpack(body)] for stage, n, body in rows}


def test_three_shards_come_to_what_one_run_does(agentloop: Run, project: Path, tmp_path: Path) -> None:
    alone = made(tmp_path / "alone")
    assert planned(agentloop) == {
        "plan": "plan",
        "n_shards": N_SHARDS,
        "n_units": N_UNITS,
        "n_stored": 0,
        "sandbox": "bubblewrap",
        "stages": [read(tmp_path / "plan")["suites"][0]["stage"]],
    }
    (project / "policy.py").unlink()  # whoever executes has only the plan
    (project / "evals").rename(project / "gone")
    (tmp_path / "plan").rename(tmp_path / "copy")
    for shard in (2, 0, 1):
        ended = agentloop("execute", "copy", "--shard", str(shard), "--json")
        assert json.loads(ended.stdout) == {"shard": shard, "n_units": 4, "n_before": 0, "n_failed": 0}
        assert ended.returncode == 0
    first = agentloop("collect", "copy", "-p", "p", "--json")
    assert first.returncode == 0, first.stderr
    ours = attempts_in(project)
    again = agentloop("collect", "copy", "-p", "p", "--json")
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert attempts_in(project) == ours

    sizes = ("--trials", str(TRIALS))
    ended = agentloop("run", "alone/evals/mini", *BY, *sizes, "-p", "alone", "--json")
    theirs = attempts_in(alone)
    assert len(theirs) == N_UNITS
    assert len({json.dumps(one[0]["steps"]) for one in theirs.values()}) == N_UNITS, "chance makes each another"
    assert {one[1]["reward"] for one in theirs.values()} == {0.0, 1.0}
    assert ours == theirs
    documents = [without_times(json.loads(each.stdout)) for each in (first, ended)]
    assert [document.pop("store") for document in documents] == ["p/traces/store.db", "alone/traces/store.db"]
    assert documents[0] == documents[1]

    shown = agentloop("collect", "copy", "-p", "p").stdout
    theirs_shown = agentloop("run", "alone/evals/mini", *BY, *sizes, "-p", "alone").stdout
    assert table(shown) == table(theirs_shown)


def table(text: str) -> list[str]:
    """Without the durations, and the last line, which names the project."""
    return re.sub(r"[0-9.]+ s ", "", text).splitlines()[:-1]


@pytest.mark.parametrize("ref", ["v1", "live"])
def test_a_registered_version_acts_where_there_is_no_store(
    agentloop: Run, project: Path, tmp_path: Path, ref: str
) -> None:
    with opened(project) as one:
        done(one, first_version(one, FixedTrainer(one)))
    shutil.copytree(project, tmp_path / "alone")
    planned(agentloop, "--policy", ref, "--sandbox", "bubblewrap", shards=1)
    shutil.move(project, tmp_path / "gone")
    assert agentloop("execute", "plan", "--shard", "0").returncode == 0
    document = json.loads(agentloop("collect", "plan", "-p", "gone", "--json").stdout)
    assert (document["version"], document["mean_reward"]) == (1, 1.0)
    sizes = ("--trials", str(TRIALS), "--sandbox", "bubblewrap")
    agentloop("run", "alone/evals/mini", "--policy", ref, *sizes, "-p", "alone")
    ours = attempts_in(tmp_path / "gone")
    assert len(ours) > N_UNITS
    assert ours == attempts_in(tmp_path / "alone")


def test_what_is_stored_is_not_planned(agentloop: Run, project: Path, tmp_path: Path) -> None:
    agentloop("run", "p/evals/mini", *BY, "-p", "p")
    assert (planned(agentloop)["n_units"], planned(agentloop)["n_stored"]) == (N_TASKS, N_TASKS)
    agentloop("execute", "plan", "--shard", "0")
    agentloop("execute", "plan", "--shard", "1")
    agentloop("execute", "plan", "--shard", "2")
    document = json.loads(agentloop("collect", "plan", "-p", "p", "--json").stdout)
    assert (document["n_trials"], document["n_continued"]) == (N_UNITS, N_TASKS)
    ended = agentloop("plan", "p/evals/mini", *BY, "--out", "other", "--trials", str(TRIALS), "-p", "p")
    assert ended.returncode == 5
    assert "all attempts are stored already; --as NAME makes all of them again" in one_line(ended.stderr)
    assert not (tmp_path / "other" / "agentloop-plan.json").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_shard_that_is_ended_goes_on_where_it_stopped(
    agentloop: Run, project: Path, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(agentloop, "--policy", "scripted:policy.py:slow", "--sandbox", "bubblewrap", shards=1)
    begun, results = tmp_path / "begun", tmp_path / "plan" / "results"
    monkeypatch.setenv("BEGUN", str(begun))
    words = ("execute", "plan", "--shard", "0", "--n-concurrent", "2")
    process = subprocess.Popen([COMMAND, *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    until(lambda: results.is_dir() and len(list(results.glob("*.json"))) >= 3)
    process.send_signal(number)
    _, printed = process.communicate(timeout=30)
    assert process.returncode == (130 if number is signal.SIGTERM else -number)
    assert "Traceback" not in printed
    before = {file: file.read_bytes() for file in results.glob("*.json")}
    assert 3 <= len(before) < N_UNITS
    ended = agentloop(*words, "--json")
    n_before = len(before)
    assert json.loads(ended.stdout) == {"shard": 0, "n_units": N_UNITS, "n_before": n_before, "n_failed": 0}
    assert all(file.read_bytes() == contents for file, contents in before.items())
    lines = begun.read_text().splitlines()
    assert len(set(lines)) == N_UNITS
    assert len(lines) <= N_UNITS + 2, "only what was in progress began twice"
    third = agentloop(*words)
    assert f"{N_UNITS} done before" in third.stdout
    assert begun.read_text().splitlines() == lines
    collected = agentloop("collect", "plan", "-p", "p")
    assert collected.returncode == 0
    assert len(attempts_in(project)) == N_UNITS


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_nothing_is_stored_until_all_is_there(agentloop: Run, project: Path, tmp_path: Path) -> None:
    planned(agentloop)
    ended = agentloop("collect", "plan", "-p", "p")
    assert ended.returncode == 1
    assert one_line(ended.stderr) == (
        "error: plan is not done: 12 of 12 units without a whole result, the first of task 'read-q0'; run `agentloop "
        "execute plan --shard 0`, and the same for each of the shards 0, 1, 2, then collect again"
    )
    for shard in range(N_SHARDS):
        agentloop("execute", "plan", "--shard", str(shard))
    [*_, victim] = sorted((tmp_path / "plan" / "results").iterdir())
    whole = victim.read_bytes()
    shard, task = next(
        (line["shard"], line["tasks"][0])
        for line in map(json.loads, (tmp_path / "plan" / "units.jsonl").read_text().splitlines())
        if line["key"] == victim.stem
    )
    victim.write_bytes(whole[: len(whole) // 2])
    ended = agentloop("collect", "plan", "-p", "p")
    assert ended.returncode == 1
    assert one_line(ended.stderr) == (
        f"error: plan is not done: 1 of 12 units without a whole result, the first of task {task!r}; run `agentloop "
        f"execute plan --shard {shard}`, then collect again"
    )
    assert attempts_in(project) == {}
    again = json.loads(agentloop("execute", "plan", "--shard", str(shard), "--json").stdout)
    assert again == {"shard": shard, "n_units": 4, "n_before": 3, "n_failed": 0}
    assert agentloop("collect", "plan", "-p", "p").returncode == 0
    assert len(attempts_in(project)) == N_UNITS


def test_attempts_that_were_lost_are_made_again(
    agentloop: Run, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = project / "evals" / "mini"
    suite.joinpath("verifier.py").write_text(VERIFIER)
    rows = [json.loads(line) for line in (suite / "tasks.jsonl").read_text().splitlines()]
    rows[1]["verifiers"] = [{"kind": "verifier.py:Absent"}]
    (suite / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.setenv("AWAY", str(tmp_path / "away"))
    (tmp_path / "away").touch()
    planned(agentloop, trials=1, shards=2)
    for shard, code in ((0, 0), (1, 4)):
        assert agentloop("execute", "plan", "--shard", str(shard)).returncode == code
    ended = agentloop("collect", "plan", "-p", "p")
    assert ended.returncode == 4
    assert "5 of 6 tasks scored" in ended.stdout
    assert one_line(ended.stderr).endswith(
        "note: attempts without a reward: to repeat them, run `agentloop execute plan --shard 1`, then collect again"
    )
    (tmp_path / "away").unlink()
    again = json.loads(agentloop("execute", "plan", "--shard", "1", "--json").stdout)
    assert again == {"shard": 1, "n_units": 3, "n_before": 2, "n_failed": 0}
    ended = agentloop("collect", "plan", "-p", "p")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "6 of 6 tasks scored" in ended.stdout
    assert len(attempts_in(project)) == N_TASKS


VERIFIER = """
import os


class Absent:
    name, version = "absent", "1"

    async def score(self, trace, sandbox):
        if os.path.exists(os.environ["AWAY"]):
            raise ConnectionError("nobody is here")
        return 1.0
"""


def test_no_secret_is_written_to_the_folder(
    agentloop: Run, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(agentloop, "--policy", "scripted:policy.py:leaks", "--sandbox", "bubblewrap", shards=1)
    secret = "correct-horse-battery-staple"
    monkeypatch.setenv("AGENTLOOP_POLICY__API_KEY", secret)
    assert agentloop("execute", "plan", "--shard", "0").returncode == 0
    files = [file for file in (tmp_path / "plan").rglob("*") if file.is_file()]
    assert len(files) > N_UNITS
    assert not any(secret.encode() in file.read_bytes() for file in files)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("execute", "nowhere", "--shard", "0"), "no plan in nowhere: it has no agentloop-plan.json; make one with"),
        (("collect", "nowhere"), "no plan in nowhere: it has no agentloop-plan.json; make one with `agentloop plan"),
        (("execute", "plan", "--shard", "3"), "no shard 3: the plan in plan has shards 0 to 2; shards count from 0"),
        (("execute", "plan", "--shard", "-1"), "no shard -1: the plan in plan has shards 0 to 2; shards count from 0"),
        (("execute", "plan"), "Missing option '--shard'"),
        (
            ("plan", "p/evals/mini", *BY, "--out", "plan", "-p", "p"),
            "plan has another plan; name a new folder with --out",
        ),
        (
            ("plan", "outside", *BY, "--out", "other", "-p", "p"),
            "suite {here}/outside is outside project {here}/p, so a plan cannot have its files; move it into",
        ),
        (
            ("plan", "p/evals/mini", "--policy", "../o.toml", "--out", "other", "-p", "p"),
            "../o.toml on suite 'mini' needs files outside project {here}/p, or images that this command built",
        ),
        (("plan", "p/evals/mini", *BY, "--out", "other"), "no agentloop.toml in ."),
    ],
)
def test_what_cannot_be_done_is_one_line(
    agentloop: Run, project: Path, tmp_path: Path, words: tuple[str, ...], line: str
) -> None:
    planned(agentloop)
    shutil.copytree(project / "evals" / "mini", tmp_path / "outside")
    (tmp_path / "o.toml").write_text('[policy]\nkind = "openai"\nmodel = "m"\nbase_url = "http://127.0.0.1:9/v1"\n')
    ended = agentloop(*words)
    assert ended.returncode == 2
    assert one_line(ended.stderr).startswith(f"error: {line.format(here=tmp_path)}")
    assert "Traceback" not in ended.stderr


def edited(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (
            lambda plan: edited(plan / "agentloop-plan.json", '"release": "', '"release": "9.'),
            "made this plan, and this is agentloop",
        ),
        (
            lambda plan: (plan / "agentloop-plan.json").write_text('{"release"'),
            "agentloop-plan.json: not the file that `agentloop plan` wrote; copy the folder again",
        ),
        (
            lambda plan: edited(plan / "agentloop-plan.json", '"n_shards"', '"shards"'),
            "agentloop-plan.json: not the file that `agentloop plan` wrote; copy the folder again",
        ),
        (
            lambda plan: edited(plan / "agentloop-plan.json", '"agent": "', '"agent": "other'),
            ".json: this result belongs to another plan than plan/agentloop-plan.json, or the plan was edited",
        ),
        (
            lambda plan: edited(plan / "units.jsonl", "read-q1", "read-q2"),
            "units.jsonl: not the file that `agentloop plan` wrote; copy the folder again",
        ),
        (
            lambda plan: (plan / "units.jsonl").unlink(),
            "units.jsonl: not the file that `agentloop plan` wrote; copy the folder again",
        ),
    ],
    ids=["release", "torn", "unknown", "edited", "units", "no-units"],
)
@pytest.mark.parametrize("command", ["execute", "collect"])
def test_files_that_are_not_those_of_the_plan_are_refused(
    agentloop: Run, project: Path, tmp_path: Path, command: str, damage: Callable[[Path], object], line: str
) -> None:
    planned(agentloop)
    agentloop("execute", "plan", "--shard", "0")
    damage(tmp_path / "plan")
    ended = agentloop(command, "plan", *(("--shard", "0") if command == "execute" else ("-p", "p")))
    assert ended.returncode == 2
    assert line in one_line(ended.stderr)
    assert len(ended.stderr.strip().split("error:")) == 2
    assert attempts_in(project) == {}


def test_a_damaged_object_is_named(agentloop: Run, project: Path, tmp_path: Path) -> None:
    planned(agentloop)
    for file in (tmp_path / "plan" / "objects").rglob("*"):
        if file.is_file():
            file.chmod(0o600)
            file.write_bytes(file.read_bytes()[:100])
    ended = agentloop("execute", "plan", "--shard", "0")
    assert ended.returncode == 4
    assert "is damaged" in one_line(ended.stderr)
    assert "Traceback" not in ended.stderr


def test_a_plan_in_the_project_is_no_part_of_the_next_one(agentloop: Run, project: Path, tmp_path: Path) -> None:
    first = planned(agentloop, out="p/plan")
    assert planned(agentloop, out="p/plan") == first
    planned(agentloop, out="p/other")
    assert read(project / "other")["bundle"] == read(project / "plan")["bundle"]
