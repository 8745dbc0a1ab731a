"""Names of a suite's files and keys."""

from __future__ import annotations

HEAD = "suite.toml"
TASKS = "tasks.jsonl"
HEAD_KEYS = ("name", "tags", "sandbox", "limits", "reward", "verifiers", "environment")
TASK_KEYS = ("id", "instruction", "split", "pool", "verifiers", "reward", "solution", "environment", "tags", "prefix")
CASE = "case.toml"
"""File of a folder in a suite that makes it a case (`case.py`)."""
CASES = f"[!.]*/{CASE}"
"""Pattern of the cases in a folder, without the hidden draft that killed mining leaves."""
PREFIX = "prefix.jsonl"
"""The turns that a task goes on from, as they are written; a task names the file by its key `prefix`."""
MUST_PASS = "must-pass"  # noqa: S105 - not that kind of pass
"""The tag of a task that no version may fail for good: the gate watches it by itself (`eprocess.py`)."""
TESTS = "tests"
"""The option of a verifier that names a folder, relative to the suite's as a verifier's own file is."""
HARBOR = "harbor"
"""The verifier of tasks in the Harbor format."""
TASK_FOLDER = "task"
"""Its option that names the task's folder."""
