"""A request's body, with its caps held while it is read and while it is inflated.

What is sent compressed may be a thousand times as large when it is not: it is inflated piece by
piece, and given up at the first byte too many.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator

MAX_SENT = 8 << 20
MAX_BODY = 64 << 20
"""Bytes of a body as it was sent, and inflated."""
MAX_RATIO = 100
FREE = 1 << 20
"""Inflated bytes up to which no ratio is asked for: small bodies of one letter are harmless."""
PIECE = 1 << 20
WBITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


class TooLarge(Exception):
    """413: more than may be sent, or more than it may inflate to."""


class UnknownEncoding(Exception):
    """415: an encoding that is none of ours, or a body that is not in it."""


async def read(pieces: AsyncIterator[bytes], encoding: str, declared: int | None) -> bytes:
    """The body, inflated.

    encoding: the Content-Encoding header, empty for none. declared: the Content-Length header.
    Raises TooLarge and UnknownEncoding.
    """
    if declared is not None and declared > MAX_SENT:
        raise TooLarge(f"a body of {declared:,} bytes; at most {MAX_SENT:,} may be sent")
    sent = bytearray()
    async for piece in pieces:
        sent += piece
        if len(sent) > MAX_SENT:
            raise TooLarge(f"a body of more than {MAX_SENT:,} bytes; send smaller batches")
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return bytes(sent)
    if name not in WBITS:
        raise UnknownEncoding(f"content-encoding {encoding!r}; gzip, deflate or none are read")
    try:
        return inflate(sent, WBITS[name])
    except zlib.error as error:
        if name == "deflate":  # what HTTP calls deflate has a header, which some leave out
            try:
                return inflate(sent, -zlib.MAX_WBITS)
            except zlib.error:
                pass
        raise UnknownEncoding(f"the body is no {name}: {error}") from None


def inflate(sent: bytes | bytearray, wbits: int) -> bytes:
    """All members of a compressed body. Raises TooLarge, and zlib.error for one that is broken or cut short."""
    made, rest = bytearray(), bytes(sent)
    while rest:
        stream = zlib.decompressobj(wbits)
        while not stream.eof:
            piece = stream.decompress(rest, PIECE)
            made += piece
            rest = stream.unconsumed_tail
            if len(made) > MAX_BODY:
                raise TooLarge(f"a body that inflates to more than {MAX_BODY:,} bytes; send smaller batches")
            # Of what was read so far, not of all: the rest of a bomb may be there to make it look honest.
            if len(made) > max(FREE, MAX_RATIO * (len(sent) - len(rest))):
                raise TooLarge(f"a body that inflates more than {MAX_RATIO} times")
            if not piece and not rest and not stream.eof:
                raise zlib.error("it is cut short")
        rest = stream.unused_data.lstrip(b"\0")
    return bytes(made)
