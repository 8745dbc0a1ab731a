"""`docs/03-gateway.md` is followed from a call to a reward, to why it failed, to a file; as it is printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.api.serving import serving
from tests.gateway.conftest import model as model
from tests.gateway.test_failures import PATHS, body_of
from tests.gateway.upstream import ModelServer

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "03-gateway.md").read_text()


def blocks(section: str = "") -> list[str]:
    """The shell blocks of a section, in order."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0] if section else PAGE.partition("\n## ")[0]
    return re.findall(r"```sh\n(.*?)```", text, re.DOTALL)


def shell(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As a person runs it, `agentloop` being on the PATH; of the lines of a block all must go well."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip


def test_from_a_call_to_a_reward_and_on(model: ModelServer, tmp_path: Path) -> None:
    start, look = blocks()
    by_name, by_request = blocks("What it was worth")
    assert start.startswith("agentloop serve --upstream http://127.0.0.1:8000/v1 ")
    (tmp_path / "traces").mkdir()
    with serving(tmp_path / "traces" / "store.db", "--upstream", model.url, folder=tmp_path) as server:
        for said in ("say The file is b0.", "status 500"):
            httpx.post(
                f"{server.url}/e/run-{7 if said.startswith('say') else 8}{PATHS['chat']}", json=body_of("chat", said)
            )
        done = shell(look, tmp_path)
        assert done.returncode == 0, done.stderr
        assert [words in done.stdout for words in ("gateway", "run-7", "The file is b0.")] == [True] * 3
        before = shell("agentloop judge; agentloop failures", tmp_path)
        assert before.returncode == 0, before.stderr
        assert "2 traces from elsewhere without a reward" in before.stderr
        assert "`agentloop judge resolve ID --reward 0 --why …`" in before.stderr.replace("\n", " ")
        done = shell(by_name, tmp_path)
        assert done.returncode == 0, done.stderr
        assert "is scored with reward 0" in done.stdout
        assert "2 traces: 1 failed, 0 succeeded, 1 of unknown outcome" in done.stdout
        (line,) = (tmp_path / "failed.jsonl").read_text().splitlines()
        assert json.loads(line)["trace"]["steps"][0]["completion"]["message"]["content"] == "The file is b0."
        put = by_request.replace("http://127.0.0.1:8321", server.url).replace("run-7", "run-8").replace("0}'", "0.5}'")
        done = shell(put, tmp_path)
        assert done.returncode == 0, done.stderr
        assert (json.loads(done.stdout)["state"], json.loads(done.stdout)["reward"]) == ("scored", 0.5)
