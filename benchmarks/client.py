"""What a call to an endpoint costs the caller: the policy `openai`, and the HTTP clients it could use.

    python benchmarks/client.py

A stub in a process of its own answers at once with 80 tokens and their log-probabilities. CPU-ms of this process a
call, in alternating rounds, alone and with 16 at once. Exits 1 when the policy takes more than 1 CPU-ms.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import multiprocessing.connection
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import aiohttp
import httpx

from agentloop.policies.openai import OpenAIPolicy
from agentloop.types import Message

MAX_CPU_MS = 1.0
N_CALLS, N_ROUNDS = 200, 5
MESSAGES = [Message(role="user", content="x" * 600)]
BODY = {"model": "m", "messages": [{"role": "user", "content": "x" * 600}], "max_tokens": 80, "logprobs": True}
LOGPROBS = [{"token": "tok", "logprob": -0.123456789, "bytes": [97, 98, 99], "top_logprobs": []}] * 80
CHOICE = {"message": {"role": "assistant", "content": "a" * 300}, "token_ids": [*range(80)], "finish_reason": "stop"}
ANSWER = {"choices": [{**CHOICE, "logprobs": {"content": LOGPROBS}}], "prompt_token_ids": [*range(160)]}


def stub(ready: multiprocessing.connection.Connection) -> None:
    body = json.dumps(ANSWER).encode()
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                (length,) = (line for line in head.lower().splitlines() if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.split(b":")[1]))
                writer.write(answer)
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


async def spent(ask: Callable[[], Awaitable[object]], at_once: int) -> float:
    """CPU-ms a call."""
    started = time.process_time()
    for _ in range(N_CALLS // at_once):
        await asyncio.gather(*(ask() for _ in range(at_once)))
    return 1e3 * (time.process_time() - started) / N_CALLS


async def measure(url: str) -> dict[str, dict[int, float]]:
    """Median over rounds, by way of asking and how many at once."""
    policy, tls = OpenAIPolicy(url, "m"), httpx.create_ssl_context()
    no_limit = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    path = f"{url}/chat/completions"
    async with httpx.AsyncClient(limits=no_limit) as kept, aiohttp.ClientSession() as session:

        async def new_httpx() -> object:
            async with httpx.AsyncClient(verify=tls) as client:
                return (await client.post(path, json=BODY)).json()

        async def kept_httpx() -> object:
            return (await kept.post(path, json=BODY)).json()

        async def kept_aiohttp() -> object:
            async with session.post(path, json=BODY) as response:
                return await response.json()

        ways = {
            "httpx, a client a call": new_httpx,
            "httpx, kept": kept_httpx,
            "aiohttp, kept": kept_aiohttp,
            "policy openai": lambda: policy.complete(MESSAGES, (), max_tokens=80, seed=1),
        }
        rounds = [
            {(way, n): await spent(ask, n) for way, ask in ways.items() for n in (1, 16)} for _ in range(N_ROUNDS)
        ]
    return {way: {n: statistics.median(each[way, n] for each in rounds[1:]) for n in (1, 16)} for way in ways}


def main() -> int:
    ours, its = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=stub, args=(its,), daemon=True)
    server.start()
    figures = asyncio.run(measure(f"http://127.0.0.1:{ours.recv()}/v1"))
    server.terminate()
    print(f"{'CPU-ms a call':24} {'alone':>8} {'16 at once':>12}")
    for way, found in figures.items():
        print(f"{way:24} {found[1]:8.2f} {found[16]:12.2f}")
    print(json.dumps({"cpu_ms": figures}))
    return int(max(figures["policy openai"].values()) > MAX_CPU_MS)


if __name__ == "__main__":
    sys.exit(main())
