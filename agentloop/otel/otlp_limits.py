"""How much one OTLP request, span and attribute may have, and the count of what had more.

All limits are here but those on bytes (`agentloop/api/bounded.py`, `inflate.py`) and on depth (`MAX_DEPTH` in
`contents.py`; protobuf itself reads 47 levels). What is over is left out and counted where OTLP has a field for it,
such as `dropped_attributes_count`; a text that is cut says so at its end. The answer to the request tells all of it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from agentloop.errors import counted

MAX_ITEMS = 50_000
"""Spans, or log records, in one request: exporters send some hundreds."""
MAX_ATTRIBUTES = 10_000
"""Of a span, an event, a link, a resource or a scope. SDKs stop at 128, but some libraries spread each message of a
conversation over a handful of attributes."""
MAX_EVENTS, MAX_LINKS = 10_000, 1_000
"""Of a span. SDKs stop at 128; one that streams has an event for each piece."""
MAX_KEY = 1_000
"""Characters of an attribute's key: one that is longer is left out, as two that were cut could be the same."""
MAX_VALUE = 16 << 20
"""Characters of a text, or bytes: an image in a message has some millions."""
MAX_CONTAINERS = 4_000_000
"""Objects and lists in one JSON body, counted by their brackets before they are made: each takes up to a hundred times
the three bytes that it is written with. Those in texts count too."""

WHY = {
    "attributes": (
        "attribute",
        f"over {MAX_ATTRIBUTES:,} of one thing, keys over {MAX_KEY:,} characters or there twice",
    ),
    "events": ("event", f"over {MAX_EVENTS:,} of one span"),
    "links": ("link", f"over {MAX_LINKS:,} of one span"),
    "values": ("text's end", f"over {MAX_VALUE:,} characters"),
}
"""What can be over a limit -> one of it, and which limit that is."""


def dropped(by_sender: int, by_us: int) -> int:
    """What a count of OTLP says, which has 32 bits."""
    return min(by_sender + by_us, 2**32 - 1)


class Lost:
    """What one request had too much of."""

    def __init__(self) -> None:
        self.n = Counter[str]()
        """Key of WHY -> how many."""
        self.n_items = 0
        """Spans or log records beyond MAX_ITEMS."""
        self._room = MAX_ITEMS

    def room(self, n: int) -> int:
        """How many of the next `n` spans or records may be read; the others are counted."""
        kept = min(n, self._room)
        self._room -= kept
        self.n_items += n - kept
        return kept

    def within(self, what: str, n: int, limit: int) -> int:
        """How many of `n` may stay; the others are counted."""
        if n <= limit:
            return n
        self.n[what] += n - limit
        return limit

    def cut(self, value: Any) -> Any:
        """A text or bytes of more than MAX_VALUE, without its end."""
        self.n["values"] += 1
        if type(value) is bytes:
            return value[:MAX_VALUE]
        return f"{value[:MAX_VALUE]}… [{len(value) - MAX_VALUE:,} more characters were cut]"

    @property
    def told(self) -> str:
        """One line; empty where nothing was lost."""
        return "; ".join(f"{counted(self.n[what], one)} ({why})" for what, (one, why) in WHY.items() if self.n[what])
