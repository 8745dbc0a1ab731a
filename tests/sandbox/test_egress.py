"""The way out of a box: real servers on this machine, asked by real programs in real boxes."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import socket
import ssl
import subprocess
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentloop.errors import ConfigError
from agentloop.protocols import SandboxBackend
from agentloop.sandbox import egress as egress_module
from agentloop.sandbox.box import Box
from agentloop.sandbox.bubblewrap import BubblewrapBackend
from agentloop.sandbox.egress import Egress, Secret
from agentloop.sandbox.process import Incoming, Outgoing
from agentloop.testing import opened
from agentloop.types import ExecResult, SandboxSpec

MIB = 1 << 20
VALUE = "Bearer agentloop-egress-test-secret"


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


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Addresses of names that are resolved here: each question takes the next, and the last one stays."""
    known: dict[str, list[str]] = {"up.test": ["127.0.0.1"]}
    real = socket.getaddrinfo

    def resolve(host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        if host not in known:
            if str(host).endswith(".test"):
                raise socket.gaierror("no such name")
            return real(host, port, *rest, **more)
        addresses = known[host]
        address = addresses.pop(0) if len(addresses) > 1 else addresses[0]
        return real(address, port, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(certificate, key) of up.test, signed by itself."""
    if shutil.which("openssl") is None:
        message = "no openssl program. Remedy: `apt install openssl`"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=up.test"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=DNS:up.test", "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture
def tls(certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """A server's context, whose certificate this machine trusts."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    return context


# ------------------------------------------------------------- the proxy, without a box


class Client:
    """One connection to the proxy, as a box's first process would lead it."""

    def __init__(self, egress: Egress) -> None:
        self.incoming = Incoming(lambda n: None)
        self.outgoing = Outgoing(self._take)
        self.said, self.ended = bytearray(), False
        self.serving = asyncio.ensure_future(egress.serve(self.incoming, self.outgoing))

    def _take(self, data: bytes) -> None:
        self.said += data
        self.ended = self.ended or not data
        self.outgoing.grant(len(data))


async def asked(egress: Egress, request: str) -> str:
    """The whole answer to one request."""
    client = Client(egress)
    client.incoming.feed(request.encode())
    client.incoming.feed(b"")
    await asyncio.wait_for(client.serving, 20)
    return client.said.decode()


def connect(target: str) -> str:
    return f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n"


def get(url: str, *headers: str) -> str:
    return "\r\n".join([f"GET {url} HTTP/1.1", *headers, "", ""])


PRIVATE = [
    "127.0.0.1", "127.1", "127.0.0.2", "0x7f000001", "0x7f.1", "2130706433", "0177.0.0.1", "017700000001", "0.0.0.0",
    "0", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]", "[0:0:0:0:0:0:0:1]", "[::1%25lo]",
    "[64:ff9b::7f00:1]", "[64:ff9b:1::a00:1]", "[2002:7f00:1::]", "[2002:a9fe:a9fe::1]", "[2001:0:7f00:1::]",
    "169.254.169.254", "0xa9fea9fe", "2852039166", "[::ffff:169.254.169.254]", "[fe80::1]", "[fd00:ec2::254]",
    "[fec0::1]", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "100.100.100.200", "192.0.0.1", "198.18.0.1",
    "224.0.0.1", "255.255.255.255", "[ff02::1]", "240.0.0.1",
]  # fmt: skip


@pytest.mark.parametrize("target", PRIVATE)
def test_no_spelling_of_a_private_address_is_public(target: str) -> None:
    async def scene() -> None:
        for request in (connect(f"{target}:443"), connect(f"{target}:80"), get(f"http://{target}/")):
            assert (await asked(Egress(("*",)), request)).startswith("HTTP/1.1 403")

    asyncio.run(scene())


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "169.254.169.254", "10.1.2.3", "::1", "fd00:ec2::254", "::ffff:10.0.0.1"]
)
def test_a_name_that_leads_inside_is_refused(names: dict[str, list[str]], address: str) -> None:
    names["evil.test"] = [address]

    async def scene() -> None:
        for allowed in ("*", "evil.test", "*.test"):
            said = await asked(Egress((allowed,)), connect("evil.test:443"))
            assert said.startswith("HTTP/1.1 403")
            assert "which this sandbox may not connect to" in said

    asyncio.run(scene())


def test_a_name_that_changes_its_address_gains_nothing(names: dict[str, list[str]]) -> None:
    async def scene() -> None:
        async with serving() as server:
            allowed = (f"rebind.test:{server.port}", f"127.0.0.1:{server.port}")
            names["rebind.test"] = ["127.0.0.1", "127.0.0.2"]
            egress = Egress(allowed)
            # Were the name asked again to connect, the connection would go to 127.0.0.2.
            assert (await asked(egress, get(f"http://rebind.test:{server.port}/"))).endswith("hello")
            assert names["rebind.test"] == ["127.0.0.2"], "the name was asked more than once"
            assert (await asked(egress, get(f"http://rebind.test:{server.port}/"))).startswith("HTTP/1.1 403")
            assert len(server.heads) == 1

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("allowed", "target", "may"),
    [
        ("up.test:{}", "up.test:{}", True),
        ("up.test:{}", "UP.TEST.:{}", True),
        ("up.test", "up.test:{}", False),
        ("up.test:1", "up.test:{}", False),
        ("*.up.test:{}", "up.test:{}", False),
        ("*.up.test:{}", "a.b.up.test:{}", True),
        ("*.up.test:{}", "evilup.test:{}", False),
        ("up.test:{}", "up.test.evil.test:{}", False),
        ("up.test:{}", "127.0.0.1:{}", True),  # the address is listed below
        ("other.test:{}", "up.test:{}", False),
    ],
)
def test_a_list_means_what_it_says(names: dict[str, list[str]], allowed: str, target: str, may: bool) -> None:
    for name in ("a.b.up.test", "evilup.test", "up.test.evil.test"):
        names[name] = ["127.0.0.1"]

    async def scene() -> None:
        async with serving() as server:
            egress = Egress((allowed.format(server.port), f"127.0.0.1:{server.port}"))
            said = await asked(egress, get(f"http://{target.format(server.port)}/"))
            assert said.startswith("HTTP/1.1 200" if may else "HTTP/1.1 403")

    asyncio.run(scene())


@pytest.mark.parametrize(
    "entry", ["", "http://a.example", "*a.example", "a.*.example", "**", "a b", "user@host", "a.example:port", "[::1]x"]
)
def test_an_entry_that_is_no_host_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match="is no host; write"):
        Egress((entry,))


@pytest.mark.parametrize(
    "request_",
    [
        "GET / HTTP/1.1\r\nHost: up.test\r\n\r\n",
        "GET https://up.test/ HTTP/1.1\r\n\r\n",
        "GET ftp://up.test/ HTTP/1.1\r\n\r\n",
        "CONNECT  HTTP/1.1\r\n\r\n",
        "CONNECT up.test:99999 HTTP/1.1\r\n\r\n",
        "nonsense\r\n\r\n",
        "GET http://\xfc.test/ HTTP/1.1\r\n\r\n",
        "GET http://up.test/ HTTP/1.1\r\nA: b\nAuthorization: mine\r\n\r\n",
        "GET http://up.test/ HTTP/1.1\r\nAuthorization:\r\n mine\r\n\r\n",
        "GET http://up.test/ HTTP/1.1\r\nA: b\rC: d\r\n\r\n",
        "GET http://up.test/ HTTP/1.1\r\n" + "A: b\r\n" * 20_000,
        "",
    ],
)
def test_a_request_that_is_none_is_told_so(request_: str) -> None:
    assert asyncio.run(asked(Egress(("*",)), request_)).startswith("HTTP/1.1 400")


def test_a_host_that_does_not_answer_is_a_bad_gateway(names: dict[str, list[str]]) -> None:
    async def scene() -> None:
        async with serving() as server:
            port = server.port
        egress = Egress((f"up.test:{port}", f"127.0.0.1:{port}", "gone.test"))
        assert (await asked(egress, connect(f"up.test:{port}"))).startswith("HTTP/1.1 502")
        assert (await asked(egress, connect("gone.test:443"))).startswith("HTTP/1.1 502")

    asyncio.run(scene())


def test_what_is_cut_in_the_middle_gets_no_words_of_ours(names: dict[str, list[str]]) -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\npart")
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()

    async def scene() -> None:
        server = await asyncio.start_server(cut, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        said = await asked(Egress((f"up.test:{port}", f"127.0.0.1:{port}")), get(f"http://up.test:{port}/"))
        assert said.endswith("part")
        server.close()

    asyncio.run(scene())


def test_a_list_that_changes_during_a_connect_holds(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        async with serving() as server:
            egress = Egress((f"127.0.0.1:{server.port}",))
            real = asyncio.open_connection

            async def slow(*args: Any, **more: Any) -> Any:
                made = await real(*args, **more)
                egress.allow(())
                return made

            monkeypatch.setattr(egress_module.asyncio, "open_connection", slow)
            assert (await asked(egress, get(f"http://127.0.0.1:{server.port}/"))).startswith("HTTP/1.1 403")
            assert server.heads == []

    asyncio.run(scene())


def test_a_secret_goes_to_its_host_by_tls_and_nowhere_else(names: dict[str, list[str]], tls: ssl.SSLContext) -> None:
    names["other.test"] = ["127.0.0.1"]

    async def scene() -> None:
        async with serving(tls) as secure, serving() as plain:
            ports = (secure.port, plain.port)
            allowed = tuple(f"{h}:{p}" for h in ("up.test", "other.test", "127.0.0.1") for p in ports)
            egress = Egress(allowed, {"up.test": Secret("Authorization", VALUE)})
            said = await asked(
                egress, get(f"http://up.test:{secure.port}/x?y", "authorization: mine", "Authorization : mine", "A: b")
            )
            assert said.endswith("hello")
            lines = secure.heads[0].split("\r\n")
            assert lines[0] == "GET /x?y HTTP/1.1"
            assert [line for line in lines if "uthorization" in line] == [f"Authorization: {VALUE}"]
            assert "A: b" in lines
            assert (await asked(egress, get(f"http://other.test:{plain.port}/"))).endswith("hello")
            assert VALUE not in plain.heads[0]
            # Not without TLS, not to whoever cannot prove the name, and not into a tunnel.
            assert (await asked(egress, get(f"http://up.test:{plain.port}/"))).startswith("HTTP/1.1 502")
            assert len(plain.heads) == 1
            assert VALUE not in (await asked(egress, connect(f"up.test:{plain.port}")))
            assert VALUE not in repr(egress._secrets)

    asyncio.run(scene())


def test_a_secret_is_not_told_to_an_impostor(
    names: dict[str, list[str]], certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)

    async def scene() -> None:
        async with serving(context) as server:
            allowed = (f"up.test:{server.port}", f"127.0.0.1:{server.port}")
            egress = Egress(allowed, {"up.test": Secret("Authorization", VALUE)})
            said = await asked(egress, get(f"http://up.test:{server.port}/"))
            assert said.startswith("HTTP/1.1 502")
            assert "certificate" in said.lower()
            assert server.heads == []

    asyncio.run(scene())


# ----------------------------------------------------------------------- from a box


def run(
    backend: SandboxBackend, scene: Callable[[Box, Server], Awaitable[None]], tls: ssl.SSLContext | None = None
) -> None:
    async def go() -> None:
        async with serving(tls) as server:
            spec = SandboxSpec(allowed_hosts=(f"up.test:{server.port}", f"127.0.0.1:{server.port}"))
            async with opened(backend, spec) as box:
                assert isinstance(box, Box)
                await asyncio.wait_for(scene(box, server), 60)

    asyncio.run(go())


async def python(box: Box, text: str, *, timeout_s: float = 30.0) -> ExecResult:
    await box.write("/tmp/program.py", textwrap.dedent(text).encode())
    return await box.exec("python3 /tmp/program.py", timeout_s=timeout_s)


def test_a_program_gets_what_it_may_and_no_more(backend: SandboxBackend, names: dict[str, list[str]]) -> None:
    async def scene(box: Box, server: Server) -> None:
        done = await python(
            box,
            f"""
            import socket, urllib.request, urllib.error
            print(urllib.request.urlopen("http://up.test:{server.port}/").read())
            for url in ("http://other.test/", "http://up.test/", "http://169.254.169.254/", "http://10.0.0.1/"):
                try: urllib.request.urlopen(url)
                except urllib.error.HTTPError as error: print(error.code)
            for address in (("127.0.0.1", {server.port}), ("169.254.169.254", 80), ("1.1.1.1", 53)):
                try: socket.create_connection(address, 2); print("connected", address)
                except OSError: pass
            try: socket.getaddrinfo("up.test", 80); print("resolved")
            except OSError: pass
            """,
        )
        assert (done.stdout, done.stderr) == ("b'hello'\n403\n403\n403\n403\n", "")
        assert len(server.heads) == 1

    run(backend, scene)


def test_tls_goes_through_unread(
    backend: SandboxBackend, names: dict[str, list[str]], tls: ssl.SSLContext, certificate: tuple[Path, Path]
) -> None:
    async def scene(box: Box, server: Server) -> None:
        await box.write("/tmp/ca.pem", certificate[0].read_bytes())
        done = await python(
            box,
            f"""
            import ssl, urllib.request
            context = ssl.create_default_context(cafile="/tmp/ca.pem")
            print(urllib.request.urlopen("https://up.test:{server.port}/", context=context).read())
            """,
        )
        assert (done.stdout, done.stderr) == ("b'hello'\n", "")

    run(backend, scene, tls)


def test_a_box_with_no_network_has_nobody_to_ask(backend: SandboxBackend) -> None:
    async def go() -> None:
        async with opened(backend) as box:
            ask = "import socket; socket.create_connection(('127.0.0.1', 3128), 2)"
            assert "ConnectionRefusedError" in (await box.exec(f'python3 -c "{ask}"')).stderr
            assert "proxy" not in (await box.exec("env")).stdout.lower()
            take = "import socket; socket.create_server(('127.0.0.1', 3128))"
            assert "in use" in (await box.exec(f'python3 -c "{take}"')).stderr, "a command can play the proxy"

    asyncio.run(go())


def test_a_program_talks_to_its_own_server_without_us(backend: SandboxBackend, names: dict[str, list[str]]) -> None:
    async def scene(box: Box, server: Server) -> None:
        await box.exec(
            "cd /tmp && echo mine > page && (python3 -m http.server 8765 --bind 127.0.0.1 > /dev/null 2>&1 &)"
        )
        done = await python(
            box,
            """
            import time, urllib.request
            for _ in range(100):
                try: print(urllib.request.urlopen("http://127.0.0.1:8765/page").read()); break
                except OSError: time.sleep(0.05)
            """,
        )
        assert done.stdout == "b'mine\\n'\n"
        assert server.heads == []

    run(backend, scene)


def test_much_goes_both_ways(backend: SandboxBackend, names: dict[str, list[str]]) -> None:
    size = 30 * MIB

    async def scene(box: Box, server: Server) -> None:
        done = await python(
            box,
            f"""
            import hashlib, urllib.request
            data = bytes(range(256)) * ({size} // 256)
            print(urllib.request.urlopen("http://up.test:{server.port}/", data).read())
            print(hashlib.sha256(urllib.request.urlopen("http://up.test:{server.port}/size/{size}").read()).hexdigest())
            """,
        )
        assert done.stdout == f"b'took'\n{hashlib.sha256(b's' * size).hexdigest()}\n"
        assert server.digests == [hashlib.sha256(bytes(range(256)) * (size // 256)).hexdigest()]

    run(backend, scene)


def test_a_reader_who_is_slow_or_dead_stops_the_sender(backend: SandboxBackend, names: dict[str, list[str]]) -> None:
    async def scene(box: Box, server: Server) -> None:
        ask = (
            f"import socket; s = socket.create_connection(('127.0.0.1', 3128)); "
            f"s.sendall(b'GET http://up.test:{server.port}/endless HTTP/1.1\\r\\n\\r\\n'); s.recv(1); "
        )
        slow = asyncio.ensure_future(box.exec(f'python3 -c "{ask} import time; time.sleep(60)"', timeout_s=60))
        await asyncio.sleep(1.0)
        before = server.n_read
        await asyncio.sleep(0.3)
        assert server.n_read == before < 64 * MIB, "what nobody reads piles up"
        slow.cancel()
        for _ in range(100):
            if not server.n_open:
                break
            await asyncio.sleep(0.05)
        assert not server.n_open, "a host goes on sending to nobody"

    run(backend, scene)


def test_one_direction_may_end_before_the_other(backend: SandboxBackend, names: dict[str, list[str]]) -> None:
    async def scene(box: Box, server: Server) -> None:
        done = await python(
            box,
            f"""
            import socket
            s = socket.create_connection(("127.0.0.1", 3128))
            s.sendall(b"CONNECT up.test:{server.port} HTTP/1.1\\r\\n\\r\\n")
            assert s.recv(4096).startswith(b"HTTP/1.1 200")
            s.sendall(b"GET /late HTTP/1.1\\r\\n\\r\\n" + b"abc")
            s.shutdown(socket.SHUT_WR)
            print(s.makefile("rb").read()[-3:])
            """,
        )
        assert (done.stdout, done.stderr) == ("b'cba'\n", "")

    run(backend, scene)


def test_more_connections_than_there_may_be(backend: SandboxBackend, names: dict[str, list[str]]) -> None:
    async def scene(box: Box, server: Server) -> None:
        done = await python(
            box,
            f"""
            import socket
            held, codes = [], []
            for n in range(200):
                s = socket.create_connection(("127.0.0.1", 3128))
                try:
                    s.sendall(b"CONNECT up.test:{server.port} HTTP/1.1\\r\\n\\r\\n")
                    codes.append(s.recv(4096)[9:12].decode() or "cut")
                except OSError:
                    codes.append("cut")
                held.append(s)
            print(codes.count("200"), sorted(set(codes) - {{"200"}})[0])
            for s in held: s.close()
            """,
        )
        assert (done.stdout, done.stderr) == ("64 503\n", "")
        again = await python(
            box,
            f"""
            import time, urllib.request
            for _ in range(50):
                try: print(urllib.request.urlopen("http://up.test:{server.port}/").read()); break
                except OSError: time.sleep(0.1)
            """,
        )
        assert again.stdout == "b'hello'\n"

    run(backend, scene)


def test_a_phase_ends_what_the_next_does_not_allow(backend: SandboxBackend, names: dict[str, list[str]]) -> None:
    async def scene(box: Box, server: Server) -> None:
        hold = (
            f"import socket; s = socket.create_connection(('127.0.0.1', 3128)); "
            f"s.sendall(b'CONNECT up.test:{server.port} HTTP/1.1\\r\\n\\r\\n'); print(s.recv(99)[9:12], flush=True); "
            "s.sendall(b'GET /hold HTTP/1.1\\r\\n\\r\\n'); print(s.recv(1))"
        )
        process = box.start(f'python3 -c "{hold}"')
        assert await process.stdout.read() == b"b'200'\n"
        box.set_network((f"up.test:{server.port}", f"127.0.0.1:{server.port}", "more.test"))
        await asyncio.sleep(0.2)
        assert server.n_open == 1, "a connection that is still allowed was cut"
        box.set_network(())
        assert await asyncio.wait_for(process.stdout.read(), 5) == b"b''\n"
        for _ in range(100):
            if not server.n_open:
                break
            await asyncio.sleep(0.02)
        assert server.n_open == 0
        get_it = f"import urllib.request; urllib.request.urlopen('http://up.test:{server.port}/')"
        assert "403" in (await box.exec(f'python3 -c "{get_it}"')).stderr
        box.set_network((f"up.test:{server.port}", f"127.0.0.1:{server.port}"))
        assert (await box.exec(f'python3 -c "{get_it}"')).exit_code == 0

    run(backend, scene)


def test_a_phase_may_open_what_was_closed(backend: SandboxBackend, names: dict[str, list[str]]) -> None:
    async def go() -> None:
        async with serving() as server, opened(backend) as box:
            assert isinstance(box, Box)
            box.set_network((f"up.test:{server.port}", f"127.0.0.1:{server.port}"))
            get_it = f"import urllib.request; urllib.request.urlopen('http://up.test:{server.port}/')"
            assert (await box.exec(f'python3 -c "{get_it}"')).exit_code == 0

    asyncio.run(go())


def test_a_box_never_has_a_secret_that_is_used_for_it(
    bubblewrap: BubblewrapBackend, names: dict[str, list[str]], tls: ssl.SSLContext
) -> None:
    async def go() -> None:
        async with serving(tls) as server:
            backend = BubblewrapBackend(secrets={"up.test": Secret("X-Key", VALUE)})
            spec = SandboxSpec(allowed_hosts=(f"up.test:{server.port}", f"127.0.0.1:{server.port}"))
            async with opened(backend, spec) as box:
                get_it = f"import urllib.request; print(urllib.request.urlopen('http://up.test:{server.port}/').read())"
                assert (await box.exec(f'python3 -c "{get_it}"')).stdout == "b'hello'\n"
                assert f"X-Key: {VALUE}" in server.heads[0]
                search = f"env; cat /proc/*/environ; grep -rl '{VALUE[7:]}' /tmp /work /run /dev/shm /etc 2>/dev/null"
                assert VALUE[7:] not in (await box.exec(search)).stdout

    asyncio.run(go())
