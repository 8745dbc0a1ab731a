"""A model server of our own, over real HTTP: what it answers is a function of what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[str, str], object]
"""(system, user) -> what the model says: a text, a value that is sent as JSON, or an HTTP status."""


@dataclass
class ModelServer:
    """Where it listens, and every request that it got."""

    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def serving(reply: Reply) -> Iterator[ModelServer]:
    """The server, for the length of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append(body)
            said = reply(body["messages"][0]["content"], body["messages"][1]["content"])
            status, answer = (said, {"error": "scripted"}) if isinstance(said, int) else (200, completion(said))
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Be quiet."""

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = ModelServer(f"http://127.0.0.1:{listening.server_address[1]}/v1")
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()


def completion(said: object) -> dict[str, Any]:
    """As a server of the OpenAI dialect says it, with usage."""
    text = said if isinstance(said, str) else json.dumps(said)
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "scripted",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": usage,
    }


def ruling(*items: tuple[bool, str]) -> dict[str, Any]:
    """A verdict on criteria, in their order: (met, evidence)."""
    return {"criteria": [{"number": n, "met": met, "evidence": words} for n, (met, words) in enumerate(items, 1)]}
