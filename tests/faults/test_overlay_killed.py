"""A turn of the trainer `gepa` that is killed ends in the version of an unkilled one, and asks for nothing twice."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentloop.config.settings import CONFIG_FILE
from agentloop.demo.overlay import SETTINGS, prepare_overlay_demo
from agentloop.demo.shop import DEMO_WORLD, ShopModel, ShopRewriter, World
from agentloop.suites.writer import write_suite
from agentloop.types import Message, Split, ToolSpec

from .command import Running

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("bubblewrap")]

N_TASKS = {Split.train: 12, Split.validation: 6, Split.heldout: 20}
N_CALLS = 5
"""Of one attempt."""
MAX_IN_PROGRESS = 16 * N_CALLS
"""Calls of attempts that act, and of those that ended and wait a tenth of a second for others, at four at once."""


class Endpoint(ThreadingHTTPServer):
    """The shop's model and its rewriter behind HTTP, which count their calls."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.calls: Counter[bytes] = Counter()
        self.rewritings: Counter[bytes] = Counter()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    @property
    def n_calls(self) -> int:
        return self.calls.total() + self.rewritings.total()

    def forget(self) -> None:
        self.calls.clear()
        self.rewritings.clear()


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(data)
        is_rewriter = body["model"] == "rewriter"
        with self.server.lock:
            (self.server.rewritings if is_rewriter else self.server.calls)[data] += 1
        if is_rewriter:
            message: dict[str, Any] = {
                "role": "assistant",
                "content": ShopRewriter().answer(body["messages"][-1]["content"], body["seed"]),
            }
        else:
            message = answer_of(body)
        time.sleep(0.005)
        reply = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""


def answer_of(body: dict[str, Any]) -> dict[str, Any]:
    """What the shop's model answers to a request of the chat dialect."""
    messages = [Message(role=one["role"], content=one.get("content") or "") for one in body["messages"]]
    functions = [tool["function"] for tool in body["tools"]]
    tools = [ToolSpec(name=one["name"], description=one["description"], parameters={}) for one in functions]
    done = asyncio.run(ShopModel().complete(messages, tools, max_tokens=1, seed=body["seed"]))
    [call] = done.message.tool_calls
    function = {"name": call.name, "arguments": call.arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call.id, "type": "function", "function": function}],
    }


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def lay(folder: Path, url: str) -> Path:
    """A small shop on the endpoint."""
    prepare_overlay_demo(folder, 0)
    world = World.of(DEMO_WORLD)
    write_suite(folder / "evals" / "shop", "shop", [t for split, n in N_TASKS.items() for t in world.tasks(split, n)])
    settings = SETTINGS.format(seed=0).replace(
        'kind = "agentloop.demo.shop:ShopModel"',
        f'kind = "openai"\nbase_url = "{url}"\nmodel = "m"\nmax_concurrent = 4',
    )
    settings = settings.replace(
        'kind = "agentloop.demo.shop:ShopRewriter"', f'kind = "openai", base_url = "{url}", model = "rewriter"'
    )
    (folder / CONFIG_FILE).write_text(settings.replace("max_attempts = 300", "max_attempts = 40"))
    return folder


def version_in(shown: str) -> tuple[int, str]:
    version = json.loads(shown)["version"]
    return version["number"], version["sha256"]


@pytest.mark.parametrize(
    ("n_kills", "how"),
    [
        (2, signal.SIGKILL),
        pytest.param(4, signal.SIGINT, marks=pytest.mark.soak),
        pytest.param(20, signal.SIGKILL, marks=pytest.mark.soak),
    ],
)
def test_a_killed_turn_makes_the_same_version_and_asks_for_nothing_twice(
    tmp_path: Path, endpoint: Endpoint, n_kills: int, how: signal.Signals
) -> None:
    command = ("train", "--sandbox", "bubblewrap", "--json")
    status, shown = Running(*command, cwd=lay(tmp_path / "whole", endpoint.url)).finish()
    assert status == 0
    whole = version_in(shown)
    n_calls = endpoint.n_calls
    n_rewritings = endpoint.rewritings.total()
    endpoint.forget()
    folder = lay(tmp_path / "killed", endpoint.url)
    for kill in range(1, n_kills + 1):
        running = Running(*command, cwd=folder)
        end = time.monotonic() + 60
        while endpoint.n_calls < n_calls * kill // (n_kills + 1) and time.monotonic() < end:
            assert running.process.poll() is None
            time.sleep(0.002)
        running.end(how)
    status, shown = Running(*command, cwd=folder).finish()
    assert status == 0
    assert version_in(shown) == whole
    n_again = endpoint.calls.total() - len(endpoint.calls)
    assert n_again <= n_kills * MAX_IN_PROGRESS
    assert endpoint.rewritings.total() - n_rewritings <= n_kills, "a recorded rewriting is not asked for again"
