"""What may become of a call at its upstream."""

from __future__ import annotations

import orjson

MAX_WORDS = 2000
"""Characters of an upstream's words that are passed on."""


class UpstreamFailed(Exception):
    """The upstream gave no answer, or broke off."""

    def __init__(self, kind: str, why: str, status: int = 502) -> None:
        """kind: a word for records. why: goes on after the upstream's name. status: what the client is told."""
        super().__init__(why)
        self.kind, self.status = kind, status


class Refusal(Exception):
    """The upstream answered with an error, in whichever dialect."""

    def __init__(self, status: int, body: bytes, retry_after: str | None) -> None:
        said, self.code = read_error(body)
        super().__init__(said or f"HTTP {status}")
        self.status, self.retry_after = status, retry_after


def read_error(body: bytes) -> tuple[str, str | None]:
    """Its words, and its word for programs, such as `context_length_exceeded`."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:500].decode(errors="replace").strip(), None
    code = None
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            code = found.get("code") or code
            found = found[key]
    words = found if isinstance(found, str) else orjson.dumps(found).decode()
    return words[:MAX_WORDS], code if isinstance(code, str) else None
