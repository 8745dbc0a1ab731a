"""A body that was sent compressed, with its caps held while it is inflated.

It may be a thousand times as large when it is not: it is inflated piece by piece, and given up at the first byte
too many. How much may be sent is not asked here; that is `bounded.py`.
"""

from __future__ import annotations

import re
import zlib

MAX_BODY = 32 << 20
"""Bytes of a body, inflated."""
MAX_RATIO = 100
FREE = 1 << 20
"""Inflated bytes up to which no ratio is asked for: small bodies of one letter are harmless."""
PIECE = 1 << 20
WINDOW = 4 << 10
"""Bytes that are inflated at once. What follows a member is copied, so a body of very many must be cut small."""
WBITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
_ZEROS = re.compile(rb"\0*")


class TooLarge(Exception):
    """413: it inflates to more than it may."""


class UnknownEncoding(Exception):
    """415: an encoding that is none of ours."""


class Broken(Exception):
    """400: a body that is not in the encoding that it says, or was cut short."""


def inflate(sent: bytes, encoding: str) -> bytes:
    """The body as it was before it was compressed.

    encoding: the Content-Encoding header, empty for none. Raises TooLarge, UnknownEncoding and Broken.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return sent
    if name not in WBITS:
        raise UnknownEncoding(f"content-encoding {encoding[:80]!r}; gzip, deflate or none are read")
    try:
        return _members(sent, WBITS[name])
    except zlib.error as error:
        if name == "deflate":  # what HTTP calls deflate has a header, which some leave out
            try:
                return _members(sent, -zlib.MAX_WBITS)
            except zlib.error:
                pass
        raise Broken(f"the body is no {name}: {error}") from None


def _members(sent: bytes, wbits: int) -> bytes:
    """All members of a compressed body. Raises TooLarge, and zlib.error for one that is broken or cut short."""
    body, at = bytearray(), 0
    while at < len(sent):
        stream = zlib.decompressobj(wbits)
        while not stream.eof:
            window = sent[at : at + WINDOW]
            piece = stream.decompress(window, PIECE)
            body += piece
            at += len(window) - len(stream.unconsumed_tail) - len(stream.unused_data)
            if len(body) > MAX_BODY:
                raise TooLarge(f"a body that inflates to more than {MAX_BODY:,} bytes; send smaller batches")
            # Of what was read so far, not of all: the rest of a bomb may be there to make it look honest.
            if len(body) > max(FREE, MAX_RATIO * at):
                raise TooLarge(f"a body that inflates more than {MAX_RATIO} times")
            if not piece and not window:
                raise zlib.error("it is cut short")
        at = _ZEROS.match(sent, at).end()  # type: ignore[union-attr]  # it matches nothing, too
    return bytes(body)
