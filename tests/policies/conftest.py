"""A real HTTP server on this machine that answers as it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Answer = tuple[int, object] | None
"""(status, JSON value or the body's bytes), or None to hang up without a word."""


@dataclass
class Endpoint:
    """Gives its answers in order, or what they make of the request, and keeps what it was asked."""

    url: str = ""
    answers: list[Answer | Callable[[Any], Answer]] = field(default_factory=list)
    pages: dict[str, object] = field(default_factory=dict)
    """What it answers to GET, by path."""
    asked: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    n_connections: int = 0
    n_open: int = 0
    all_closed: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    kept = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # head and body are sent apart

        def setup(self) -> None:
            super().setup()
            kept.n_connections += 1
            kept.n_open += 1
            kept.all_closed.clear()

        def finish(self) -> None:
            kept.n_open -= 1
            if not kept.n_open:
                kept.all_closed.set()
            super().finish()

        def do_GET(self) -> None:
            self._send(200 if self.path in kept.pages else 404, kept.pages.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            kept.asked.append((self.path, dict(self.headers), body))
            given = kept.answers.pop(0)
            answer = given(body) if callable(given) else given
            if answer is None:
                self.close_connection = True
                return
            self._send(*answer)

        def _send(self, status: int, value: object) -> None:
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Be quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kept.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield kept
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses before retries, which are recorded and not waited for."""
    made: list[float] = []

    async def pause(seconds: float) -> None:
        made.append(seconds)

    monkeypatch.setattr("agentloop.policies.openai.asyncio.sleep", pause)
    return made
