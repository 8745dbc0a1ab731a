"""`docs/00-tutorial.md` is followed from its first file to the gate's PASS, and prints what the page shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ci.runner import action

PAGE = (Path(__file__).parents[2] / "docs" / "00-tutorial.md").read_text()
HOSTED = "https://api.openai.com/v1"
BLOCK = re.compile(
    r"(?:^`(?P<file>[\w./-]+)`:\n\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
TRACE = re.compile(r"(?<=agentloop traces show )\w+")
EXIT_CODES = [0, 0, 0, 0, 1, 0]
"""Of the blocks of commands after the installation: only the gate of the worse agent fails."""


def reply(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The model's next message: it calls the tool where the prompt asks for it, and repeats the tool's result."""
    prompt, mail, last = messages[0]["content"], messages[1]["content"], messages[-1]
    order = re.findall(r"\b[A-Za-z]-\d+\b", mail)[0]
    if last["role"] == "tool":
        return {"role": "assistant", "content": last["content"].removeprefix("error: ").capitalize()}
    if "Call find_order" not in prompt:
        return {"role": "assistant", "content": f"Good news: order {order} will arrive soon!"}
    call = {"name": "find_order", "arguments": json.dumps({"order_id": order})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": call}]}


class Model(BaseHTTPRequestHandler):
    """A hosted model behind the dialect of OpenAI, the same on every run."""

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = reply(request["messages"])
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        document = {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": request["model"],
            "choices": [choice],
        }
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def hosted_model() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def shell(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As a person runs it, `agentloop` being on the PATH; output and messages in the order in which they came."""
    person = {f"GIT_{role}_{key}": "you@example.com" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder, env={**os.environ, **person, "PATH": path, "COLUMNS": "160", "GIT_CONFIG_GLOBAL": os.devnull},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=180,
    )  # fmt: skip


def change(file: Path, diff: str) -> None:
    """Make the one change of a diff."""
    lines = diff.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    text = file.read_text()
    assert text.count(before) == 1, f"the page changes in {file.name}: {before}"
    file.write_text(text.replace(before, after))


def assert_prints(output: str, text: str) -> None:
    """Each line of `text` was printed, in this order; `…` stands for any text, alone on a line for any lines."""
    printed = iter([line.strip() for line in output.splitlines()])
    for line in filter(lambda line: line != "…", text.splitlines()):
        pattern = re.escape(line.strip()).replace("…", ".*")
        assert any(re.fullmatch(pattern, each) for each in printed), f"the page shows {line!r}, not printed:\n{output}"


@pytest.mark.slow
def test_an_agent_becomes_a_gated_agent(tmp_path: Path) -> None:
    """Every block of the page in its order, but for the installation and CI; then the last gate has passed."""
    output, exit_codes = "", iter(EXIT_CODES)
    shell("git init --quiet", tmp_path)
    with hosted_model() as url:
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
