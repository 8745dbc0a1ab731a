"""A page of the documentation is followed as a person would: its files, its commands, and what they print."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HOSTED = "https://api.openai.com/v1"
BLOCK = re.compile(
    r"(?:^`(?P<file>[\w./-]+)`:\n\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


class Model(BaseHTTPRequestHandler):
    """A hosted model behind the dialect of OpenAI, the same on every run."""

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = self.server.reply(request)  # type: ignore[attr-defined]
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
def hosted_model(reply: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[str]:
    """Its URL. reply: a request -> the assistant's message."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    server.reply = reply  # type: ignore[attr-defined]
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
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=600,
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
