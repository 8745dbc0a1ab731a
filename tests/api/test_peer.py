"""Whose socket is at the other end, over real loopback connections: as the kernel itself says it by its files."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from agentloop.api import peer
from agentloop.api.peer import Address, uid_of

FROM_V6 = "::ffff:127.0.0.1"


@contextmanager
def connected(to: str, client_to: str | None = None) -> Iterator[tuple[socket.socket, Address, Address]]:
    """(the client's socket, its address as the server sees it, the server's address)."""
    family = socket.AF_INET6 if ":" in to else socket.AF_INET
    try:
        listening = socket.create_server((to, 0), family=family)
    except OSError:
        pytest.skip(f"no {to} on this machine")
    with listening:
        asked = client_to or to
        client = socket.socket(socket.AF_INET6 if ":" in asked else socket.AF_INET)
        with client:
            client.connect((asked, listening.getsockname()[1]))
            accepted, _ = listening.accept()
            with accepted:
                yield client, accepted.getpeername()[:2], accepted.getsockname()[:2]


@pytest.fixture(params=["netlink", "table"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "table":

        def refused(ends: object) -> int | None:
            raise PermissionError("this process may not ask")

        monkeypatch.setattr(peer, "_by_netlink", refused)
    return str(request.param)


@pytest.mark.parametrize(
    ("to", "client_to"), [("127.0.0.1", None), ("::1", None), ("127.0.0.1", FROM_V6), ("127.0.0.2", None)]
)
def test_the_user_of_a_connection(way: str, to: str, client_to: str | None) -> None:
    with connected(to, client_to) as (client, at_client, at_server):
        assert uid_of(at_client, at_server) == os.stat(f"/proc/self/fd/{client.fileno()}").st_uid == os.geteuid()
        client.shutdown(socket.SHUT_WR)
        assert uid_of(at_client, at_server) == os.geteuid(), "a client that has sent everything still reads"


def test_a_connection_that_its_program_has_closed_is_nobody_s(way: str) -> None:
    """The kernel shows such a socket with user 0, who is root."""
    with connected("127.0.0.1") as (client, at_client, at_server):
        client.close()
        assert uid_of(at_client, at_server) is None


def test_a_program_that_listens_at_the_address_is_not_the_client(way: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert uid_of(other.getsockname(), ("127.0.0.1", 9)) is None


@pytest.mark.parametrize(
    ("client", "server"),
    [
        (("192.0.2.1", 5), ("127.0.0.1", 6)),
        (("127.0.0.1", 5), ("192.0.2.1", 6)),
        (("127.0.0.1", 1), ("127.0.0.1", 1)),
        (("testclient", 5), ("127.0.0.1", 6)),
        (("2001:db8::1", 5), ("::1", 6)),
    ],
)
def test_what_is_no_connection_of_this_machine_has_no_user(way: str, client: Address, server: Address) -> None:
    assert uid_of(client, server) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts a program of another user; test_judgement.py uses sudo")
def test_another_user_s_connection(way: str) -> None:
    code = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(); "
        "s.connect(('127.0.0.1', int(sys.argv[1]))); s.recv(1)"
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(20)
        process = subprocess.Popen([sys.executable, "-c", code, str(listening.getsockname()[1])])
        accepted, at_client = listening.accept()
        with accepted:
            assert uid_of(at_client, accepted.getsockname()) == 65534
        assert process.wait(20) == 0
