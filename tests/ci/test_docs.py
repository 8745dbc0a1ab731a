"""docs/07-ci.md says what the Action, the command and the verdicts are."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib

import pytest
import yaml

from agentloop.gate.outcomes import GateVerdict

from .runner import ROOT, action

PAGE = (ROOT / "docs" / "07-ci.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_workflow_takes_ten_lines_and_gives_what_the_action_requires() -> None:
    workflow = blocks("yaml")[0]
    assert len(workflow.splitlines()) <= 10
    steps = yaml.safe_load(workflow)["jobs"]["gate"]["steps"]
    given = set(steps[1]["with"])
    required = {name for name, described in action()["inputs"].items() if described.get("required")}
    assert required <= given <= set(action()["inputs"])
    assert re.search(r"actions/checkout@[0-9a-f]{40} # v", workflow)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["gate", "bank"])
def test_the_options_are_those_of_the_command(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agentloop_cli", command, "--help"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "COLUMNS": "200", "NO_COLOR": "1"},
    )
    lines = [line for text in blocks("sh") for line in text.splitlines()] + yaml.safe_load(blocks("yaml")[1])["gate"][
        "script"
    ]
    calls = [shlex.split(line, comments=True) for line in lines if line.startswith(f"agentloop {command} ")]
    assert calls
    for call in calls:
        for option in [word for word in call if word.startswith("--")]:
            assert option in done.stdout, option


def test_the_exit_codes_are_those_of_the_verdicts() -> None:
    rows = dict(re.findall(r"^\| ([A-Z]+) \| (\d) \|", PAGE, re.MULTILINE))
    assert rows == {verdict.value: str(verdict.exit_code) for verdict in GateVerdict}


def test_gitlab_keeps_the_report_of_a_gate_that_failed() -> None:
    job = yaml.safe_load(blocks("yaml")[1])["gate"]
    assert job["artifacts"]["when"] == "always"
    assert f"--junit {job['artifacts']['reports']['junit']} " in job["script"][0]
    assert job["artifacts"]["paths"][0] in job["script"][0]


def test_the_quarantine_is_toml_with_a_reason_and_an_end() -> None:
    (entry,) = tomllib.loads(blocks("toml")[0])["quarantine"]
    assert entry["reason"]
    assert entry["since"] < entry["expires"]
