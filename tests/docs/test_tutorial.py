"""`docs/00-tutorial.md` is followed from its first file to the gate's PASS, and prints what the page shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ci.runner import action

from .walk import BLOCK, HOSTED, assert_prints, change, hosted_model, shell

PAGE = (Path(__file__).parents[2] / "docs" / "00-tutorial.md").read_text()
TRACE = re.compile(r"(?<=agentloop traces show )\w+")
EXIT_CODES = [0, 0, 0, 0, 1, 0]
"""Of the blocks of commands after the installation: only the gate of the worse agent fails."""


def reply(request: dict[str, Any]) -> dict[str, Any]:
    """The model's next message: it calls the tool where the prompt asks for it, and repeats the tool's result."""
    messages = request["messages"]
    prompt, mail, last = messages[0]["content"], messages[1]["content"], messages[-1]
    order = re.findall(r"\b[A-Za-z]-\d+\b", mail)[0]
    if last["role"] == "tool":
        return {"role": "assistant", "content": last["content"].removeprefix("error: ").capitalize()}
    if "Call find_order" not in prompt:
        return {"role": "assistant", "content": f"Good news: order {order} will arrive soon!"}
    call = {"name": "find_order", "arguments": json.dumps({"order_id": order})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": call}]}


@pytest.mark.slow
def test_an_agent_becomes_a_gated_agent(tmp_path: Path) -> None:
    """Every block of the page in its order, but for the installation and CI; then the last gate has passed."""
    output, exit_codes = "", iter(EXIT_CODES)
    shell("git init --quiet", tmp_path)
    with hosted_model(reply) as url:
        for block in BLOCK.finditer(PAGE.replace(HOSTED, url)):
            text, file = block["text"], tmp_path / (block["file"] or ".")
            match block["language"]:
                case "diff":
                    change(file, text)
                case "sh" if "pip install" not in text:
                    trace = TRACE.search(output)
                    done = shell(TRACE.sub(trace[0], text) if trace else text, tmp_path)
                    output = done.stdout
                    assert done.returncode == next(exit_codes), output
                case "":
                    assert_prints(output, text)
                case _ if block["file"]:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(text)
    assert next(exit_codes, None) is None
    assert re.search(r"^PASS ", output, re.MULTILINE)


def test_the_steps_for_ci_fit_the_action_and_the_page() -> None:
    github, gitlab = (yaml.safe_load(block["text"]) for block in BLOCK.finditer(PAGE) if block["language"] == "yaml")
    assert set(github[0]["with"]) <= set(action()["inputs"])
    install, gate = gitlab["gate"]["script"][1:]
    assert install.rsplit("/agentloop ", 1)[1] in PAGE.partition("## 2.")[0], "the same packages as in step 1"
    assert gate.partition(" --junit")[0] in PAGE.partition("## 8.")[0]
