"""Traces as ATIF 1.8 documents: a folder of them, or one a line. `atif_write.py` says what a document holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from agentloop.formats.atif_write import write
from agentloop.formats.jsonl import line
from agentloop.protocols import Stored


class AtifFiles:
    """An Exporter. Of the verdict ATIF has the reward alone, in `extra.reward`."""

    name, suffix, media_type, one_each = "atif", ".json", "application/x-ndjson", True

    def write(self, traces: Iterable[Stored]) -> Iterator[bytes]:
        """See `Exporter`."""
        for stored in traces:
            made = write(stored.trace)
            if stored.verdict.reward is not None:
                made.setdefault("extra", {})["reward"] = stored.verdict.reward
            yield line(made)
