"""`docs/00-tutorial.md` is followed from its first file to the gate's PASS, and prints what the page shows."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.ci.runner import action

from .walk import BLOCK, HOSTED, assert_prints, change, shell

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "00-tutorial.md").read_text()
MODEL = "examples/order_model.py"
TRACE = re.compile(r"(?<=agentloop traces show )\w+")
EXIT_CODES = [0, 0, 0, 0, 1, 0]
"""Of the blocks of commands after the installation: only the gate of the worse agent fails."""
MAX_MINUTES = 15
"""From the first command after the installation to the gate's PASS."""


@contextmanager
def scripted_model() -> Iterator[str]:
    """Runs the model that the page names for readers without a key. Returns its URL, on a free port."""
    with subprocess.Popen([sys.executable, ROOT / MODEL, "0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


@pytest.mark.slow
def test_an_agent_becomes_a_gated_agent(tmp_path: Path) -> None:
    """Every block of the page in its order, but for the installation and CI; then the last gate has passed."""
    output, exit_codes = "", iter(EXIT_CODES)
    begin = time.monotonic()
    shell("git init --quiet", tmp_path)
    with scripted_model() as url:
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
    assert time.monotonic() - begin <= MAX_MINUTES * 60


def test_the_page_names_the_model_and_its_address() -> None:
    (port,) = re.findall(r"else (\d+)$", (ROOT / MODEL).read_text(), re.MULTILINE)
    assert f"`python ../agentloop/{MODEL}`" in PAGE
    assert f"`http://127.0.0.1:{port}/v1`" in PAGE


def test_the_steps_for_ci_fit_the_action_and_the_page() -> None:
    github, gitlab = (yaml.safe_load(block["text"]) for block in BLOCK.finditer(PAGE) if block["language"] == "yaml")
    assert set(github[0]["with"]) <= set(action()["inputs"])
    install, gate = gitlab["gate"]["script"][1:]
    assert install.rsplit("/agentloop ", 1)[1] in PAGE.partition("## 2.")[0], "the same packages as in step 1"
    assert gate.partition(" --junit")[0] in PAGE.partition("## 8.")[0]
