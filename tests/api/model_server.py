"""A model service that answers what a script says, as OpenAI's chat and responses and Anthropic's messages do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

MODEL = "scripted-1"
PIECE = 4
"""Characters of text and arguments that a streamed event brings."""


class Call(NamedTuple):
    """A tool call; arguments as a model writes them."""

    id: str
    name: str
    arguments: str


class Answer(NamedTuple):
    """What a request is answered with; of one whose status is not 200 the text says what is wrong."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    n_in: int = 0
    n_out: int = 0
    status: int = 200


class ModelServer(NamedTuple):
    """url: its root; asked: the bodies of all requests, in order."""

    url: str
    asked: list[dict[str, Any]]


@contextmanager
def answering(script: Sequence[Answer]) -> Iterator[ModelServer]:
    """Serves each request the next answer, and status 410 when there are no more."""
    left = list(script)
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or each answer waits 40 ms for its second packet

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer = left.pop(0) if left else Answer("the script is at its end", status=410)
            asked.append(request)
            if answer.status != 200:
                error = {"type": "server_error", "message": answer.text}
                self.reply(answer.status, "application/json", json.dumps({"type": "error", "error": error}))
                return
            whole, events = DIALECTS[self.path.rpartition("/")[2]]
            made = whole(answer, str(len(asked)))
            if request.get("stream"):
                kind, data = "text/event-stream", "".join(_event(event) for event in events(answer, made, request))
            else:
                kind, data = "application/json", json.dumps(made)
            self.reply(200, kind, data)

        def reply(self, status: int, kind: str, data: str) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data.encode())))
            self.end_headers()
            self.wfile.write(data.encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.1,))
    thread.start()
    try:
        yield ModelServer(f"http://127.0.0.1:{server.server_address[1]}", asked)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _event(event: dict[str, Any] | str) -> str:
    if isinstance(event, str):
        return f"data: {event}\n\n"
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" if "type" in event else _event(json.dumps(event))


def _pieces(text: str) -> Iterable[str]:
    return (text[n : n + PIECE] for n in range(0, len(text), PIECE))


# ------------------------------------------------------------------------- chat completions


def _finish(answer: Answer) -> str:
    return "tool_calls" if answer.calls else "stop"


def _chat(answer: Answer, id_: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None, "refusal": None}
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return {
        "id": f"chatcmpl-{id_}",
        "created": 1_700_000_000,
        "model": MODEL,
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": _finish(answer), "logprobs": None}],
        "usage": {
            "prompt_tokens": answer.n_in,
            "completion_tokens": answer.n_out,
            "total_tokens": answer.n_in + answer.n_out,
        },
    }


def _chat_events(answer: Answer, whole: dict[str, Any], request: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return {**whole, "object": "chat.completion.chunk", "choices": [choice], "usage": None}

    yield chunk({"role": "assistant", "content": ""})
    for piece in _pieces(answer.text):
        yield chunk({"content": piece})
    for n, call in enumerate(answer.calls):
        function = {"name": call.name, "arguments": ""}
        yield chunk({"tool_calls": [{"index": n, "id": call.id, "type": "function", "function": function}]})
        for piece in _pieces(call.arguments):
            yield chunk({"tool_calls": [{"index": n, "function": {"arguments": piece}}]})
    yield chunk({}, _finish(answer))
    if (request.get("stream_options") or {}).get("include_usage"):
        yield {**whole, "object": "chat.completion.chunk", "choices": []}
    yield "[DONE]"


# ------------------------------------------------------------------------- responses


def _response(answer: Answer, id_: str) -> dict[str, Any]:
    output: list[dict[str, Any]] = []
    if answer.text:
        text = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        output.append(
            {"type": "message", "id": f"msg_{id_}", "role": "assistant", "status": "completed", "content": [text]}
        )
    for call in answer.calls:
        function = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "status": "completed"}
        output.append({**function, "name": call.name, "arguments": call.arguments})
    usage = {"input_tokens": answer.n_in, "output_tokens": answer.n_out, "total_tokens": answer.n_in + answer.n_out}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    return {
        "id": f"resp_{id_}",
        "object": "response",
        "created_at": 1_700_000_000,
        "status": "completed",
        "model": MODEL,
        "output": output,
        "usage": usage | details,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "temperature": 1.0,
        "top_p": 1.0,
    }


def _response_events(answer: Answer, whole: dict[str, Any], request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    numbers = iter(range(1000))

    def event(kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": next(numbers), **fields}

    yield event("created", response={**whole, "status": "in_progress", "output": [], "usage": None})
    for n, item in enumerate(whole["output"]):
        where = {"item_id": item["id"], "output_index": n}
        if item["type"] == "message":
            (part,) = item["content"]
            yield event("output_item.added", output_index=n, item={**item, "status": "in_progress", "content": []})
            yield event("content_part.added", **where, content_index=0, part={**part, "text": ""})
            for piece in _pieces(answer.text):
                yield event("output_text.delta", **where, content_index=0, delta=piece, logprobs=[])
            yield event("output_text.done", **where, content_index=0, text=answer.text, logprobs=[])
            yield event("content_part.done", **where, content_index=0, part=part)
        else:
            yield event("output_item.added", output_index=n, item={**item, "status": "in_progress", "arguments": ""})
            for piece in _pieces(item["arguments"]):
                yield event("function_call_arguments.delta", **where, delta=piece)
            yield event("function_call_arguments.done", **where, name=item["name"], arguments=item["arguments"])
        yield event("output_item.done", output_index=n, item=item)
    yield event("completed", response=whole)


# ------------------------------------------------------------------------- messages


def _stop_reason(answer: Answer) -> str:
    return "tool_use" if answer.calls else "end_turn"


def _message(answer: Answer, id_: str) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": answer.text}] if answer.text else []
    for call in answer.calls:
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
    return {
        "id": f"msg_{id_}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": content,
        "stop_reason": _stop_reason(answer),
        "stop_sequence": None,
        "usage": {"input_tokens": answer.n_in, "output_tokens": answer.n_out},
    }


def _message_events(answer: Answer, whole: dict[str, Any], request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    usage = {"input_tokens": answer.n_in, "output_tokens": 1}
    yield {"type": "message_start", "message": {**whole, "content": [], "stop_reason": None, "usage": usage}}
    for n, block in enumerate(whole["content"]):
        is_text = block["type"] == "text"
        yield {
            "type": "content_block_start",
            "index": n,
            "content_block": {**block, "text": ""} if is_text else {**block, "input": {}},
        }
        for piece in _pieces(block["text"] if is_text else json.dumps(block["input"])):
            delta = {"type": "text_delta", "text": piece} if is_text else {"type": "input_json_delta"}
            yield {"type": "content_block_delta", "index": n, "delta": {"partial_json": piece, **delta}}
        yield {"type": "content_block_stop", "index": n}
    delta = {"stop_reason": _stop_reason(answer), "stop_sequence": None}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": answer.n_out}}
    yield {"type": "message_stop"}


DIALECTS = {
    "completions": (_chat, _chat_events),
    "responses": (_response, _response_events),
    "messages": (_message, _message_events),
}
"""Last part of a path -> an answer whole, and that one in events."""
