"""Finds the user of this machine at the other end of a loopback connection, from the kernel's socket table.

The kernel answers for one socket over netlink (sock_diag(7)), which takes about ten microseconds. `/proc/net/tcp` and
`/proc/net/tcp6` show the same table; reading them takes milliseconds, so they are used only if netlink is not allowed.

This identifies users, not programs: it does not stop another program of the same user.
"""

from __future__ import annotations

import socket
import struct
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any

from starlette.types import Scope

SOCK_DIAG, BY_FAMILY, REQUEST, ERROR = 4, 20, 1, 2
"""Netlink constants: the protocol, the message type of a request, its flag, the message type of an error."""
LISTEN = 10
"""The TCP state of a listening socket, which has no other end."""
TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_QUESTION = struct.Struct("=IHHII BBBBI 2s2s16s16sIII")
_ANSWER = struct.Struct("=IHHII BBBB 48s IIIII")
Address = tuple[str, int]


def peer_uid(scope: Scope) -> int | None:
    """The user at the other end of an ASGI request's connection; None if the kernel does not know.

    The kernel does not know it for a connection from another machine, for a unix socket, and if the other end is
    closed.
    """
    client = scope.get("client")
    server = scope.get("server")
    if not client or not server or server[1] is None:
        return None
    return uid_of((client[0], client[1]), (server[0], server[1]))


def uid_of(client: Address, server: Address) -> int | None:
    """The user who owns the socket that is bound to `client` and connected to `server`, both (host, port)."""
    try:
        ends = _Ends(client, server)
    except ValueError:
        return None
    if not ends.is_loopback:
        return None
    try:
        return _by_netlink(ends)
    except OSError:
        return _by_table(ends)


class _Ends:
    """Both ends of a connection; an IPv4 address in IPv6 form counts as IPv4."""

    def __init__(self, client: Address, server: Address) -> None:
        # A link-local IPv6 address has its interface behind a percent sign.
        addresses = [ip_address(host.partition("%")[0]) for host, _ in (client, server)]
        plain = [(a.ipv4_mapped or a) if isinstance(a, IPv6Address) else a for a in addresses]
        self.is_loopback = all(address.is_loopback for address in plain)
        self.is_v4 = all(address.version == 4 for address in plain)
        self.client, self.server = (address.packed for address in plain)
        self.ports = client[1], server[1]


def _by_netlink(ends: _Ends) -> int | None:
    """The user from netlink. Raises OSError if this process may not use it."""
    family = socket.AF_INET if ends.is_v4 else socket.AF_INET6
    ports = (port.to_bytes(2, "big") for port in ends.ports)
    addresses = (address.ljust(16, b"\0") for address in (ends.client, ends.server))
    header = (_QUESTION.size, BY_FAMILY, REQUEST, 1, 0)
    # The bit mask takes sockets in all states; a cookie of ones matches any (INET_DIAG_NOCOOKIE).
    body = (family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF, *ports, *addresses, 0, 0xFFFFFFFF, 0xFFFFFFFF)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, SOCK_DIAG) as netlink:
        netlink.sendto(_QUESTION.pack(*header, *body), (0, 0))
        answer = netlink.recv(4096)
    if len(answer) < _ANSWER.size or struct.unpack_from("=H", answer, 4) == (ERROR,):
        return None
    fields: tuple[Any, ...] = _ANSWER.unpack_from(answer)
    state = fields[6]
    uid = fields[-2]
    inode = fields[-1]
    if inode and state != LISTEN:  # inode 0: the program has closed the socket
        return int(uid)
    return None


def _by_table(ends: _Ends) -> int | None:
    """The user from the files that show the table."""
    # A server that listens on IPv6 for both kinds sees an IPv4 client as ::ffff:127.0.0.1.
    wanted = {_row(ends, mapped=False), _row(ends, mapped=True)}
    for path in TABLES:
        try:
            lines = path.read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if (fields[1], fields[2]) in wanted and int(fields[3], 16) != LISTEN and fields[9] != "0":
                return int(fields[7])
    return None


def _row(ends: _Ends, *, mapped: bool) -> tuple[str, str]:
    """(client, server) in the format of these files: words of 32 bits in the machine's byte order, in hex."""
    prefix = b"\0" * 10 + b"\xff\xff" if mapped and ends.is_v4 else b""
    sides = zip((prefix + ends.client, prefix + ends.server), ends.ports, strict=True)
    client, server = (
        "".join(f"{word:08X}" for word in struct.unpack(f"={len(address) // 4}I", address)) + f":{port:04X}"
        for address, port in sides
    )
    return client, server
