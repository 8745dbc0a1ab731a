"""A repository of somebody who has an agent: a suite of cheap tasks, a policy whose one number a pull request changes.

`python -m tests.ci.scratch FOLDER` makes one, to be looked at.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

N_TASKS, TRIALS = 120, 8
POLICY = '''"""Knows every answer, and tells it this often."""

from agentloop.policies.scripted import ScriptedPolicy, call_message

SKILL = 0.95
ALWAYS = SKILL > 0.5  # whether a must-pass task is answered as it should


def policy(tasks):
    known = {task.instruction: task for task in tasks}

    def script(messages, rng):
        task = known[messages[0].content]
        right = ALWAYS if "must-pass" in task.tags else rng.random() < SKILL
        return call_message("submit", answer=task.verifiers[0].options["expected"] if right else "no idea")

    return ScriptedPolicy(script, name="coin")
'''
SUITE = """name = "coin"

[sandbox]
read_only = true

[limits]
max_steps = 2
"""


def make(folder: Path) -> Path:
    """The repository, with its bank filled and committed on `main`."""
    suite = folder / "evals" / "coin"
    suite.mkdir(parents=True)
    (suite / "suite.toml").write_text(SUITE)
    with (suite / "tasks.jsonl").open("w") as file:
        for n in range(N_TASKS):
            row = {
                "id": f"word-{n:03d}",
                "instruction": f"Say word number {n}.",
                "split": "heldout",
                "verifiers": [{"kind": "exact", "expected": f"w{n}"}],
                **({"tags": ["must-pass"]} if n < 3 else {}),
            }
            file.write(json.dumps(row) + "\n")
    (folder / "policy.py").write_text(POLICY)
    (folder / ".gitignore").write_text(".agentloop/\nagentloop-gate/\n")
    git(folder, "init", "--quiet", "--initial-branch=main")
    filled = ["bank", "evals/coin", "--policy", "scripted:policy.py:policy", "--as", "main", "--trials", str(TRIALS)]
    subprocess.run(
        [sys.executable, "-m", "agentloop_cli", *filled, "--sandbox", "bubblewrap"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    commit(folder, "An agent, its suite, and what it does today")
    return folder


def change(folder: Path, old: str, new: str) -> None:
    """What a pull request does to the policy."""
    git(folder, "checkout", "--quiet", "-B", "change", "main")
    text = (folder / "policy.py").read_text()
    assert old in text
    (folder / "policy.py").write_text(text.replace(old, new))
    commit(folder, f"{old} -> {new}")


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", message)


def git(folder: Path, *arguments: str) -> None:
    person = {f"GIT_{who}_{what}": "dev@example.test" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    subprocess.run(["git", *arguments], cwd=folder, check=True, env={**os.environ, **person})


if __name__ == "__main__":
    make(Path(sys.argv[1]))
