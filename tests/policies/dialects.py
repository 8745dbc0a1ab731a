"""A model server of two dialects, over real HTTP: OpenAI's chat completions and Anthropic's messages."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Endpoint:
    """Gives its answers in order, (status, JSON value) or None to hang up, and keeps what it was asked."""

    url: str = ""
    answers: list[tuple[int, Any] | None] = field(default_factory=list)
    asked: list[tuple[str, Any]] = field(default_factory=list)


@contextmanager
def serving(*answers: tuple[int, Any] | None) -> Iterator[Endpoint]:
    """The server, for the length of the block."""
    kept = Endpoint(answers=list(answers))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            kept.asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            answer = kept.answers.pop(0)
            if answer is None:
                return
            data = json.dumps(answer[1]).encode()
            self.send_response(answer[0])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Be quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kept.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def openai_says(text: str | None, *calls: tuple[str, str, str], model: str = "gpt-4o") -> tuple[int, Any]:
    """100 prompt tokens, 40 of them cached, and 10 more. calls: (id, name, arguments)."""
    made = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    return 200, {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})},
                "finish_reason": "tool_calls" if made else "stop",
            }
        ],
        "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 40}},
    }


def anthropic_says(*blocks: dict[str, Any]) -> tuple[int, Any]:
    """100 fresh prompt tokens, 50 read from the cache, and 10 more."""
    return 200, {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "claude-sonnet-4-5",
        "content": list(blocks),
        "stop_reason": "tool_use" if blocks[-1]["type"] == "tool_use" else "end_turn",
        "usage": {
            "input_tokens": 100,
            "output_tokens": 10,
            "cache_read_input_tokens": 50,
            "cache_creation_input_tokens": 0,
        },
    }
