"""Runs the `run:` steps of a composite Action with bash, as GitHub's runner does, and refuses what it does not know.

Expressions are evaluated where the runner would: in `env:`, `if:` and `with:`. Steps that `uses:` another Action are
noted and not run.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
BASH = ("bash", "--noprofile", "--norc", "-eo", "pipefail")


def action() -> dict[str, Any]:
    """What action.yml says."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
    return found


@dataclass
class Ran:
    """What came of it."""

    code: int = 0
    """Of the first step that failed, which is the Action's own."""
    outputs: dict[str, str] = field(default_factory=dict)
    """Of the Action."""
    log: str = ""
    summary: str = ""
    steps: list[str] = field(default_factory=list)
    """Names of those that were run, or would have been."""
    used: dict[str, dict[str, str]] = field(default_factory=dict)
    """Actions of others that a runner would have called, with what they would have been given."""


def run(
    inputs: Mapping[str, str],
    workspace: Path,
    temp: Path,
    *,
    event: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    installed: bool = True,
) -> Ran:
    """The Action in `workspace`. temp: the runner's folder. installed: leave out the step that installs agentloop."""
    described, ran = action(), Ran()
    summary = temp / "summary.md"
    known: dict[str, Any] = {
        "inputs": {key: str(value.get("default", "")) for key, value in described["inputs"].items()} | dict(inputs),
        "github": {"action_path": str(ROOT), "token": (environ or {}).get("GITHUB_TOKEN", ""), "event": event},
        "steps": {},
    }
    known["inputs"] = {key: str(_filled(value, known)) for key, value in known["inputs"].items()}
    base = {
        "PATH": os.environ["PATH"],
        "HOME": str(temp),
        "RUNNER_TEMP": str(temp),
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    base |= {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "PYTHON", "AGENTLOOP_"))}
    base |= {key: value for key, value in (environ or {}).items() if key != "GITHUB_TOKEN"}
    for n, step in enumerate(described["runs"]["steps"]):
        condition = str(step.get("if", "success()")).removeprefix("${{").removesuffix("}}").strip()
        if ("always()" not in condition and ran.code) or not _true(condition, known):
            continue
        ran.steps.append(step["name"])
        if "uses" in step:
            ran.used[step["uses"]] = {key: str(_filled(value, known)) for key, value in step["with"].items()}
            continue
        if installed and step["name"].startswith("Install"):
            continue
        script, output = temp / f"step{n}.sh", temp / f"output{n}"
        script.write_text(step["run"])
        output.touch()
        mine = {key: str(_filled(value, known)) for key, value in step.get("env", {}).items()}
        done = subprocess.run(
            [*BASH, str(script)],
            cwd=workspace,
            env={**base, "GITHUB_OUTPUT": str(output), **mine},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        ran.log += done.stdout + done.stderr
        ran.code = ran.code or done.returncode
        outputs = dict(line.split("=", 1) for line in output.read_text().splitlines())
        known["steps"][step.get("id", str(n))] = {"outputs": outputs}
    ran.summary = summary.read_text() if summary.exists() else ""
    ran.outputs = {key: str(_filled(value["value"], known)) for key, value in described["outputs"].items()}
    return ran


def _filled(value: object, known: Mapping[str, Any]) -> object:
    return re.sub(r"\$\{\{ *([\w.-]+) *\}\}", lambda m: str(_looked_up(m[1], known) or ""), str(value))


def _true(condition: str, known: Mapping[str, Any]) -> bool:
    """Terms joined by &&: a function, a comparison with a text, or something that is there."""
    return all(_term(term.strip(), known) for term in condition.split("&&"))


def _term(term: str, known: Mapping[str, Any]) -> bool:
    if term in ("always()", "success()"):
        return True
    if found := re.fullmatch(r"([\w.-]+) (==|!=) '([^']*)'", term):
        return (str(_looked_up(found[1], known) or "") == found[3]) == (found[2] == "==")
    return bool(_looked_up(term, known))


def _looked_up(path: str, known: Mapping[str, Any]) -> Any:
    """An unknown first name is a mistake in action.yml; what is not there below it is empty, as on the runner."""
    first, *others = path.split(".")
    found: Any = known[first]
    for name in others:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
