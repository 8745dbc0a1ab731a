"""The README is run: its task, its verifier and its settings are taken from the page as they stand."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from parts import Run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def scripted_project(agentloop: Run, folder: Path) -> Path:
    """A project as `init` makes it, with the policy that plays the tasks' own solutions."""
    assert agentloop("init", str(folder)).returncode == 0
    settings = folder / "agentloop.toml"
    settings.write_text(settings.read_text().replace('kind = "tiny" ', 'kind = "scripted" '))
    return folder


def test_the_first_command_comes_early_and_own_things_take_less_than_60_lines():
    lines = README.splitlines()
    assert next(i for i, line in enumerate(lines) if line.startswith("make demo")) < 25
    assert lines.index("## In CI") - lines.index("## Your own task") < 60


def test_the_task_of_the_readme_can_be_added_and_is_right(agentloop: Run, tmp_path: Path) -> None:
    project = scripted_project(agentloop, tmp_path / "p")
    with (project / "evals/notes/tasks.jsonl").open("a") as tasks:
        tasks.write(blocks("json")[0])
    done = agentloop("loop", str(project), "--sandbox", "bubblewrap")
    assert done.returncode == 0, done.stderr
    assert "train tasks: 376 right, 0 wrong, 0 unscored" in done.stderr, "125 files x 3 questions, and this one"


def test_the_verifier_of_the_readme_scores_the_task_of_the_readme(agentloop: Run, tmp_path: Path) -> None:
    suite = scripted_project(agentloop, tmp_path / "p") / "evals/notes"
    (suite / "mine.py").write_text(blocks("python")[0])
    shutil.copy(suite / "files/train/a0", suite / "files/heldout/a0")
    task = json.loads(blocks("json")[0])
    wordy = {**task, "id": "long", "instruction": "Say nothing short.", "solution": ["echo one two three"]}
    rows = [
        {**task, "verifiers": [{"kind": "mine.py:WordCount", "limit": 1}]},
        {**wordy, "verifiers": [{"kind": "mine.py:WordCount", "limit": 2}]},
    ]
    (suite / "tasks.jsonl").write_text("".join(json.dumps({**row, "split": "heldout"}) + "\n" for row in rows))
    done = agentloop("loop", str(tmp_path / "p"), "--sandbox", "bubblewrap", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["heldout"]["after"]["success"] == 0.5


@pytest.mark.slow
def test_the_settings_of_the_readme_are_settings(agentloop: Run, tmp_path: Path) -> None:
    project = scripted_project(agentloop, tmp_path / "p")
    settings = re.sub(
        r"\[policy\].*?(?=\n\[)", blocks("toml")[0], (project / "agentloop.toml").read_text(), flags=re.DOTALL
    )
    (project / "agentloop.toml").write_text(settings)
    done = agentloop("loop", str(project), "--sandbox", "bubblewrap")
    assert done.returncode == 4, "nothing listens there, so the run ends as an infrastructure failure"
    assert "127.0.0.1:8000/v1/chat/completions" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_python_of_the_sandboxes_page_runs(tmp_path: Path, bubblewrap: object) -> None:
    page = (ROOT / "sandboxes" / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "hi\n 3\n/tmp\n5\n\n1\n"
    assert (tmp_path / "out" / "note").read_text() == "text"
