"""A scripted model behind OpenAI's chat completions: it plays the model of docs/00-tutorial.md, without a key.

python order_model.py
"""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def reply(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The next message: it calls the tool if the prompt asks for it, and repeats the tool's result."""
    prompt, mail, last = messages[0]["content"], messages[1]["content"], messages[-1]
    order = re.findall(r"\b[A-Za-z]-\d+\b", mail)[0]
    if last["role"] == "tool":
        return {"role": "assistant", "content": last["content"].removeprefix("error: ").capitalize()}
    if "Call find_order" not in prompt:
        return {"role": "assistant", "content": f"Good news: order {order} will arrive soon!"}
    call = {"name": "find_order", "arguments": json.dumps({"order_id": order})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": call}]}


class Endpoint(BaseHTTPRequestHandler):
    """Answers each POST with `reply`, whatever the key and the path."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = reply(request["messages"])
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        answer = {"id": "x", "object": "chat.completion", "created": 1, "model": request["model"], "choices": [choice]}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """No log, so that the terminal stays quiet."""


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8765
    server = ThreadingHTTPServer(("127.0.0.1", port), Endpoint)
    print(f"http://127.0.0.1:{server.server_port}/v1", flush=True)
    server.serve_forever()
