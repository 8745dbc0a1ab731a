"""What a sandbox's programs may be allowed to ask: an HTTP server on this machine's loopback."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

MIB = 1 << 20


@dataclass
class Server:
    """An HTTP server on this machine's loopback that remembers what it was asked."""

    port: int = 0
    heads: list[str] = field(default_factory=list)
    n_open: int = 0
    n_read: int = 0
    digests: list[str] = field(default_factory=list)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_open += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            await self.body(head.split()[1], head, reader, writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.n_open -= 1
            writer.close()

    async def body(self, path: str, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if path == "/hold":
            await reader.read()
        elif path == "/deaf":
            await asyncio.sleep(30.0)
        elif path == "/endless":
            while True:
                writer.write(bytes(MIB))
                await writer.drain()
                self.n_read += MIB
        elif path == "/late":  # answers once it has been told that nothing more comes
            data = await reader.read()
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + data[::-1])
        elif path.startswith("/size/"):
            n = int(path.rpartition("/")[2])
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {n}\r\n\r\n".encode())
            for at in range(0, n, MIB):
                writer.write(b"s" * min(MIB, n - at))
                await writer.drain()
        elif head.startswith("POST"):
            n = int(head.lower().partition("content-length:")[2].split()[0])
            self.digests.append(hashlib.sha256(await reader.readexactly(n)).hexdigest())
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ntook")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server()
    listening = await asyncio.start_server(server.answer, "127.0.0.1", 0, ssl=tls, backlog=200)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
