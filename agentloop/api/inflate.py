"""Inflates a compressed body within limits on its size.

A body may inflate to a thousand times its size, so it is inflated piece by piece, up to the first byte over a limit.
The compressed size is limited in `body_limit.py`.
"""

from __future__ import annotations

import re
import zlib

MAX_BODY = 32 << 20
"""Maximum bytes of an inflated body."""
MAX_RATIO = 100
FREE = 1 << 20
"""The ratio applies above this many inflated bytes: a small body of one repeated letter is harmless."""
PIECE = 1 << 20
WINDOW = 4 << 10
"""Compressed bytes that are inflated at once: zlib copies the bytes after each member, so a body of many members needs
small windows."""
WBITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
_ZEROS = re.compile(rb"\0*")


class TooLarge(Exception):
    """413: the body inflates beyond a limit."""


class UnknownEncoding(Exception):
    """415: an unsupported encoding."""


class Broken(Exception):
    """400: the body does not match its encoding, or was cut short."""


def inflate(sent: bytes, encoding: str) -> bytes:
    """The body before compression.

    encoding: the Content-Encoding header, empty without one. Raises TooLarge, UnknownEncoding and Broken.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return sent
    if name not in WBITS:
        raise UnknownEncoding(f"content-encoding {encoding[:80]!r}; send gzip, deflate or none")
    try:
        return _members(sent, WBITS[name])
    except zlib.error as error:
        if name == "deflate":  # HTTP's deflate has a zlib header, which some clients omit
            try:
                return _members(sent, -zlib.MAX_WBITS)
            except zlib.error:
                # The first error is reported, since it is about the form that HTTP defines.
                pass
        raise Broken(f"the body is not {name}: {error}") from None


def _members(sent: bytes, wbits: int) -> bytes:
    """All members of a compressed body. Raises TooLarge, and zlib.error for a body that is broken or cut short."""
    body = bytearray()
    at = 0
    while at < len(sent):
        stream = zlib.decompressobj(wbits)
        while not stream.eof:
            window = sent[at : at + WINDOW]
            # Bounded, because one window may inflate a thousandfold.
            piece = stream.decompress(window, PIECE)
            body += piece
            at += len(window) - len(stream.unconsumed_tail) - len(stream.unused_data)
            if len(body) > MAX_BODY:
                raise TooLarge(f"the body inflates to more than {MAX_BODY:,} bytes; send smaller batches")
            # The ratio so far, not that of the whole body: a bomb may end with incompressible data to look harmless.
            if len(body) > max(FREE, MAX_RATIO * at):
                raise TooLarge(f"the body inflates to more than {MAX_RATIO} times its size; send it uncompressed")
            if not piece and not window:
                raise zlib.error("it is cut short")
        # Zeros may pad the end of a member, as `gzip -d` accepts, too.
        at = _ZEROS.match(sent, at).end()  # type: ignore[union-attr]  # it matches nothing, too
    return bytes(body)
