"""A server of models that does what the last thing said to it tells: over real HTTP, in a thread.

    say WORDS            answers that              long N         answers N characters
    call NAME JSON       calls a tool              slow S         waits S seconds before each piece of its answer
    status N [SECONDS]   refuses, with Retry-After hang           says nothing until the client goes away
    and FAILURES, by their names

A result of a tool is answered with `It says: RESULT`, anything else with `You said: WORDS`. Chat completions have
exact tokens as vLLM gives them: a message's are its role, its bytes and an end, so each turn extends the one before.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from parts import need_ports

from tests.api.model_server import DIALECTS, MODEL, Answer, Call

PIECE = 4
ROLES = {"system": 1001, "developer": 1001, "user": 1002, "assistant": 1003, "tool": 1004}
END = 1000
TOO_LONG = "This model's maximum context length is 1024 tokens. However, your request has 4096 tokens."
ODD = (
    [1, 2],
    "text",
    {},
    {"choices": []},
    {"choices": ["text"]},
    {"choices": [{"message": "text"}]},
    {"choices": [{"message": {"content": ["x"], "tool_calls": "none"}}], "usage": [1]},
    {"choices": [{"message": {"content": "x", "tool_calls": [7]}, "logprobs": {"content": [{"no": 1}, 7]}}]},
    {"choices": [{"message": {"content": "x"}, "token_ids": "x"}], "prompt_token_ids": {"a": 1}, "usage": {}},
    {"choices": [{"message": {"content": "x"}, "token_ids": [1, "2"], "logprobs": [3]}], "prompt_token_ids": [2**70]},
    {"choices": [{"message": {"content": "x"}, "finish_reason": 7}], "usage": {"prompt_tokens": "many"}, "model": 7},
    {"choices": [{"message": {"content": "\x00"}, "finish_reason": "\x00"}], "model": "\x00", "id": "\x00"},
    {"type": "message", "content": [7, {"type": 7}], "usage": 7},
    {"output": [7, {"type": "message", "content": 7}], "usage": 7},
)
"""Answers with status 200 that are none, or hardly one."""


@dataclass
class Asked:
    """One request, and the exact tokens of its answer."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    prompt_ids: list[int] = field(default_factory=list)
    answer_ids: list[int] = field(default_factory=list)


@dataclass
class ModelServer:
    """url: with `/v1`. n_open: requests under way; n_left: those of which the client went away."""

    url: str = ""
    is_vllm: bool = True
    asked: list[Asked] = field(default_factory=list)
    n_open: int = 0
    n_left: int = 0
    n_lists: int = 0
    """How often it was asked for its models."""
    list_status: int = 200
    failing: int = 0
    """So many requests are refused with 500, whatever they say."""
    models: tuple[str, ...] = (MODEL,)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [each.body for each in self.asked]

    async def list(self, request: web.Request) -> web.Response:
        self.n_lists += 1
        owner = "vllm" if self.is_vllm else "somebody"
        data = [{"id": name, "object": "model", "created": 1, "owned_by": owner} for name in self.models]
        return web.json_response({"object": "list", "data": data}, status=self.list_status)

    async def count(self, request: web.Request) -> web.Response:
        """As vLLM's `/tokenize`, and as Anthropic's `count_tokens`, which here are nine tokens for all."""
        body = json.loads(await request.read())
        self.asked.append(Asked(request.path, body, {name.lower(): value for name, value in request.headers.items()}))
        if request.path == "/tokenize":
            tokens = prompt_of(body)
            return web.json_response({"count": len(tokens), "max_model_len": 1024, "tokens": tokens})
        return web.json_response({"input_tokens": 9})

    async def take(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        asked = Asked(request.path, body, {name.lower(): value for name, value in request.headers.items()})
        self.asked.append(asked)
        self.n_open += 1
        try:
            return await self._answer(request, asked)
        except (asyncio.CancelledError, ConnectionError):
            self.n_left += 1
            raise
        finally:
            self.n_open -= 1

    async def _answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        body, dialect = asked.body, request.path.rpartition("/")[2]
        role, words = last_said(body)
        verb, _, rest = words.partition(" ")
        if self.failing:
            self.failing -= 1
            verb, rest = "status", "500"
        if verb == "status":
            code, _, after = rest.partition(" ")
            return web.json_response(
                error(int(code)), status=int(code), headers={"Retry-After": after} if after else {}
            )
        if verb == "context":
            return web.json_response(error(400, TOO_LONG, "context_length_exceeded"), status=400)
        if verb == "redirect":
            raise web.HTTPFound("http://127.0.0.1:1/elsewhere")
        if verb == "hang":
            await asyncio.sleep(3600)
        if verb == "drop":
            _abort(request)
            return web.Response()
        if verb == "empty":
            return web.Response(body=b"", content_type="application/json")
        if verb == "garbage":
            return web.Response(body=bytes(range(256)) * 8, content_type="text/event-stream")
        if verb == "nojson":
            return web.Response(text='data: {"choices": [\n\n' if body.get("stream") else '{"choices": [')
        if verb == "odd":
            value = json.dumps(ODD[int(rest)])
            return web.Response(text=f"data: {value}\n\ndata: [DONE]\n\n" if body.get("stream") else value)
        if verb == "deep":
            value = "[" * 500 + "]" * 500
            return web.Response(
                text=f'data: {{"choices": {value}}}\n\n' if body.get("stream") else f'{{"choices": {value}}}'
            )
        answer = _to_say(role, verb, rest, words)
        whole, events = DIALECTS[dialect]
        prompt = prompt_of(body) if dialect == "completions" and self.is_vllm else []
        n_out = len(tokens_of(answer))
        made = whole(answer._replace(n_in=len(prompt) or 11, n_out=n_out), str(len(self.asked)))
        exact = prompt and body.get("return_token_ids")
        if prompt:
            asked.prompt_ids, asked.answer_ids = prompt, tokens_of(answer)
        if not body.get("stream"):
            if exact:
                made |= {"prompt_token_ids": prompt}
                made["choices"][0]["token_ids"] = asked.answer_ids
            if prompt and body.get("logprobs"):
                made["choices"][0]["logprobs"] = {"content": [logprob(token) for token in asked.answer_ids]}
            text = json.dumps(made)
            if verb in ("half", "error"):
                return await _half(request, text.encode(), whole=False)
            if verb == "slow":
                await asyncio.sleep(float(rest))
            return web.Response(text=text, content_type="application/json")
        said = list(events(answer._replace(n_in=len(prompt) or 11, n_out=n_out), made, body))
        if prompt:
            said = list(_with_tokens(said, body, asked))
        pieces = [_event(event) for event in said]
        return await self._stream(request, verb, rest, pieces, dialect)

    async def _stream(
        self, request: web.Request, verb: str, rest: str, pieces: list[str], dialect: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        if verb in ("half", "error"):
            await response.write("".join(pieces[: len(pieces) // 2]).encode())
            if verb == "error":
                shape = {"type": "error"} if dialect != "completions" else {}
                await response.write(_event({**shape, **error(500, "the engine died")}).encode())
            await asyncio.sleep(0.05)
            if verb == "half":
                _abort(request)
            return response
        if verb == "forever":
            while True:
                await response.write(pieces[len(pieces) // 2].encode() * 100)
                await asyncio.sleep(0)
        for piece in pieces if verb == "slow" else ["".join(pieces)]:
            await response.write(piece.encode())
            if verb == "slow":
                await asyncio.sleep(float(rest))
        if verb == "linger":
            await asyncio.sleep(3600)
        return response


async def _half(request: web.Request, data: bytes, *, whole: bool) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "application/json", "content-length": str(len(data))})
    await response.prepare(request)
    await response.write(data[: len(data) // 2])
    await asyncio.sleep(0.05)
    _abort(request)
    return response


def _abort(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.close()


def error(status: int, message: str = "not now", code: str | None = None) -> dict[str, Any]:
    return {"error": {"type": "some_error", "message": message, "code": code}}


def last_said(body: dict[str, Any]) -> tuple[str, str]:
    """(role, text) of the last message, in any dialect."""
    if "input" in body:
        last = body["input"] if isinstance(body["input"], str) else body["input"][-1]
        if isinstance(last, str):
            return "user", last
        if last.get("type") == "function_call_output":
            return "tool", _text(last["output"])
        return last["role"], _text(last["content"])
    last = body["messages"][-1]
    content = last.get("content")
    if isinstance(content, list) and content and content[-1].get("type") == "tool_result":
        return "tool", _text(content[-1]["content"])
    return last["role"], _text(content)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _to_say(role: str, verb: str, rest: str, words: str) -> Answer:
    if role == "tool":
        return Answer(f"It says: {words}")
    if verb == "say":
        return Answer(rest)
    if verb == "long":
        return Answer("x" * int(rest))
    if verb == "call":
        calls = [re.fullmatch(r"(?:call )?(\w+) (.*)", line, re.S) for line in words.splitlines()]
        found = [match for match in calls if match]
        return Answer(
            "I look.", tuple(Call(f"call_{zlib.crc32(words.encode())}_{n}", m[1], m[2]) for n, m in enumerate(found))
        )
    return Answer(f"You said: {words}")


# ------------------------------------------------------------------------- exact tokens


def prompt_of(body: dict[str, Any]) -> list[int]:
    """The tokens of a request of chat completions."""
    return [token for message in body["messages"] for token in _message(message)] + [ROLES["assistant"]]


def tokens_of(answer: Answer) -> list[int]:
    calls = [[call.name, json.loads(call.arguments)] for call in answer.calls]
    return [*answer.text.encode(), *(json.dumps(calls).encode() if calls else b""), END]


def _message(message: dict[str, Any]) -> list[int]:
    calls = tuple(
        Call(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    )
    return [ROLES[message["role"]], *tokens_of(Answer(_text(message.get("content")), calls))]


def logprob(token: int) -> dict[str, Any]:
    return {"token": f"t{token}", "logprob": -(token % 16) / 16, "bytes": None, "top_logprobs": []}


def _with_tokens(events: list[Any], body: dict[str, Any], asked: Asked) -> Iterator[Any]:
    """Chunks with the tokens that they bring: those before the last a few each, and the last one what is left."""
    left = list(asked.answer_ids)
    chunks = [event for event in events if isinstance(event, dict) and event["choices"]]
    for event in events:
        if not isinstance(event, dict) or not event["choices"]:
            yield event
            continue
        n = len(left) if event is chunks[-1] else 0 if event is chunks[0] else min(PIECE, len(left))
        (choice,) = event["choices"]
        more: dict[str, Any] = {}
        if body.get("return_token_ids"):
            more["token_ids"] = left[:n]
        if body.get("logprobs"):
            more["logprobs"] = {"content": [logprob(token) for token in left[:n]]}
        del left[:n]
        made = {**event, "choices": [{**choice, **more}]}
        if event is chunks[0] and body.get("return_token_ids"):
            made["prompt_token_ids"] = asked.prompt_ids
        yield made


def _event(event: dict[str, Any] | str) -> str:
    if isinstance(event, str):
        return f"data: {event}\n\n"
    named = f"event: {event['type']}\n" if "type" in event else ""
    return f"{named}data: {json.dumps(event)}\n\n"


# ------------------------------------------------------------------------- the thread


@contextmanager
def model_server(*, is_vllm: bool = True, models: tuple[str, ...] = (MODEL,)) -> Iterator[ModelServer]:
    need_ports()
    server = ModelServer(is_vllm=is_vllm, models=models)
    ready, ended = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(
            [
                web.get("/v1/models", server.list),
                web.post("/v1/messages/count_tokens", server.count),
                *([web.post("/tokenize", server.count)] if is_vllm else []),
                *(web.post(f"/v1/{path}", server.take) for path in ("chat/completions", "responses", "messages")),
            ]
        )
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        ready.set()
        await ended.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()
