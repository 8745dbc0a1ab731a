"""Bodies as they are sent: honest ones come out whole, hostile ones are given up early."""

from __future__ import annotations

import asyncio
import gzip
import os
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentloop.api import inflate

TEXT = os.urandom(200_000)


def read(sent: bytes, encoding: str = "", declared: int | None = None, piece: int = 65_536) -> bytes:
    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(sent), piece):
            yield sent[at : at + piece]

    return asyncio.run(inflate.read(pieces(), encoding, declared))


def raw_deflate(data: bytes) -> bytes:
    made = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return made.compress(data) + made.flush()


@pytest.mark.parametrize(
    ("sent", "encoding"),
    [
        (TEXT, ""),
        (TEXT, "identity"),
        (gzip.compress(TEXT), "gzip"),
        (gzip.compress(TEXT), " GZIP "),
        (gzip.compress(TEXT[:5]) + gzip.compress(TEXT[5:]), "gzip"),
        (gzip.compress(TEXT) + b"\0" * 512, "gzip"),
        (zlib.compress(TEXT), "deflate"),
        (raw_deflate(TEXT), "deflate"),
    ],
)
def test_what_was_sent_comes_out(sent: bytes, encoding: str) -> None:
    assert read(sent, encoding) == TEXT


def test_an_empty_body_is_empty() -> None:
    assert read(b"") == read(gzip.compress(b""), "gzip") == read(b"", "gzip") == b""


@pytest.mark.parametrize(
    ("sent", "encoding"),
    [
        (gzip.compress(TEXT)[:-20_000], "gzip"),
        (gzip.compress(TEXT)[:-4], "gzip"),
        (b"plain", "gzip"),
        (b"plain", "deflate"),
        (TEXT, "br"),
        (gzip.compress(TEXT), "gzip, gzip"),
    ],
)
def test_what_is_not_in_its_encoding_is_refused(sent: bytes, encoding: str) -> None:
    with pytest.raises(inflate.UnknownEncoding):
        read(sent, encoding)


GROWTH = """
import asyncio, resource, sys
from agentloop.api import inflate

async def pieces(data):
    yield data

bomb = open(sys.argv[1], "rb").read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    asyncio.run(inflate.read(pieces(bomb), "gzip", None))
except inflate.TooLarge as error:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, error)
"""


@pytest.mark.parametrize("kind", ["a thousand to one", "many members", "honest at first"])
def test_a_bomb_is_given_up_before_it_takes_memory(kind: str, tmp_path: Path) -> None:
    bomb = gzip.compress(bytes(200 << 20), 9)
    sent = {
        "a thousand to one": bomb,
        "many members": gzip.compress(bytes(8 << 20), 9) * 100,
        "honest at first": gzip.compress(os.urandom(4 << 20)) + bomb,
    }[kind]
    (tmp_path / "bomb").write_bytes(sent)
    command = [sys.executable, "-c", GROWTH, str(tmp_path / "bomb")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(said.split()[0]) < 80, said


def test_small_bodies_of_one_letter_are_no_bomb() -> None:
    assert read(gzip.compress(bytes(500_000), 9), "gzip") == bytes(500_000)


def test_more_than_may_be_sent_is_refused_by_its_header_or_by_counting() -> None:
    with pytest.raises(inflate.TooLarge, match="at most 8,388,608"):
        read(b"", declared=inflate.MAX_SENT + 1)
    with pytest.raises(inflate.TooLarge, match="more than 8,388,608"):
        read(bytes(inflate.MAX_SENT + 1))
