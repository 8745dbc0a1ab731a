"""`agentloop run` that is killed, and started again, asks for the missing attempts alone: the endpoint counts them."""

from __future__ import annotations

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
from harbor.folders import make_task
from loop.mini import N_HELDOUT, N_TRAIN, make_mini
from sandbox.roots import busybox_root

from agentloop.config.settings import STORE
from agentloop.store.store import Store

from .command import Running

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("bubblewrap")]

N_REQUESTS = 2
"""Of each attempt."""
N_CONCURRENT = 4
MAX_IN_PROGRESS = 4 * N_CONCURRENT
"""Attempts that act, and those that ended and wait a tenth of a second for others, to share their commit."""
N_TASKS = {"own": N_TRAIN + N_HELDOUT, "harbor": 6}
ANSWER_S, SETTLE_S = 0.02, 0.2
"""How long the endpoint takes for an answer, and until it has counted what was on its way."""


class Endpoint(ThreadingHTTPServer):
    """Answers with a command, then with what it printed, and knows how often each attempt began."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.n_requests = 0
        self.begun: Counter[int] = Counter()
        """By seed, which each attempt has its own of."""
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def count(self, body: dict[str, Any]) -> None:
        with self.lock:
            self.n_requests += 1
            if len(body["messages"]) == 1:
                self.begun[body["seed"]] += 1

    def wait_for(self, n_requests: int, running: Running) -> None:
        """Until `running` has asked often enough."""
        end = time.monotonic() + 60.0
        while self.n_requests < n_requests and time.monotonic() < end and running.process.poll() is None:
            time.sleep(0.002)


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.count(body)
        time.sleep(ANSWER_S)
        first, last = body["messages"][0]["content"], body["messages"][-1]
        name, arguments = "submit", {"answer": last["content"].strip()}
        if last["role"] != "tool":
            file = first.split()[-1].removesuffix("?")
            name, arguments = "shell", {"command": f"cat {file} || {{ mkdir -p /app && touch /app/done; }}"}
        call = {"id": "c", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        data = json.dumps({"choices": [{"message": message, "finish_reason": "tool_calls"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""


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


def lay(folder: Path, kind: str) -> str:
    """A suite of `kind` in the new `folder`; its path from there."""
    if kind == "own":
        make_mini(folder)
        (folder / "agentloop.toml").unlink()
        return "evals/mini"
    root = busybox_root(folder / "root")
    for n in range(N_TASKS[kind]):
        make_task(folder / "tasks" / f"t{n}", toml="", image=root)
    return "tasks"


def committed(folder: Path) -> dict[str, int]:
    """Episode -> the seed of its first request, of each attempt on disk."""
    if not (folder / STORE).exists():
        return {}
    store = Store(folder / STORE, create=False)
    try:
        rows = store.find_traces(limit=1000)
        return {str(row.episode_id): int(str(row.episode_id)[:12], 16) % 2**31 for row in rows}
    finally:
        store.close()


@pytest.mark.parametrize(
    ("kind", "n_kills", "trials"),
    [("own", 2, 2), ("harbor", 1, 4), pytest.param("own", 20, 8, marks=pytest.mark.soak)],
)
def test_a_killed_run_repeats_no_attempt_that_is_on_disk(
    tmp_path: Path, endpoint: Endpoint, kind: str, n_kills: int, trials: int
) -> None:
    suite, n_attempts = lay(tmp_path, kind), trials * N_TASKS[kind]
    command = (
        "run", suite, "--base-url", endpoint.url, "--model", "m", "--sandbox", "bubblewrap", "--json", "--trials",
        str(trials), "--n-concurrent", str(N_CONCURRENT),
    )  # fmt: skip
    on_disk: dict[str, int] = {}
    begun: dict[int, int] = {}
    for kill in range(1, n_kills + 1):
        running = Running(*command, cwd=tmp_path)
        endpoint.wait_for(N_REQUESTS * n_attempts * kill // (n_kills + 1), running)
        assert running.end(signal.SIGKILL)[0] == -signal.SIGKILL
        time.sleep(SETTLE_S)
        before, on_disk = on_disk, committed(tmp_path)
        assert before.items() < on_disk.items(), "attempts are committed while the run is under way, and none is lost"
        assert begun == {seed: endpoint.begun[seed] for seed in begun}, "none on disk is asked for again"
        assert len(endpoint.begun) - len(on_disk) <= MAX_IN_PROGRESS
        begun = {seed: endpoint.begun[seed] for seed in on_disk.values()}
    n_requests = endpoint.n_requests
    status, shown = Running(*command, cwd=tmp_path).finish()
    document = json.loads(shown)
    assert (status, document["n_trials"], document["mean_reward"]) == (0, n_attempts, 1.0)
    assert document["n_continued"] == len(on_disk)
    assert endpoint.n_requests - n_requests == N_REQUESTS * (n_attempts - len(on_disk))
    assert begun == {seed: endpoint.begun[seed] for seed in begun}, "none on disk is asked for again"
    assert len(endpoint.begun) == len(committed(tmp_path)) == n_attempts, "none is lost"
    assert sum(endpoint.begun.values()) - n_attempts <= n_kills * MAX_IN_PROGRESS
