"""The tap of the benchmarks beside a server that closes connections which it promised to keep."""

from __future__ import annotations

import asyncio
import json

import aiohttp

from benchmarks.fidelity import Tap

ANSWER = {"prompt_token_ids": [1], "choices": [{"token_ids": [2]}]}


async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the first request of a connection, and close the connection when the second one arrives."""
    body = json.dumps(ANSWER).encode()
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    await reader.read(1)
    writer.close()


async def called(n: int) -> list[int]:
    """The status of each of `n` calls, one after the other."""
    async with await asyncio.start_server(answer_once, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        tap = Tap(f"http://127.0.0.1:{port}")
        async with tap.listening(0) as at, aiohttp.ClientSession() as session:
            statuses = []
            for seed in range(n):
                async with session.post(f"{at}/v1/chat/completions", json={"seed": seed}) as answer:
                    statuses.append(answer.status)
        assert len(tap.returned) == statuses.count(200)
        return statuses


def test_a_connection_that_the_server_closes_loses_no_call() -> None:
    assert asyncio.run(called(3)) == [200, 200, 200]
