"""Lines that outlive their writer: what a run has found so far, so that the same command continues after `kill -9`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from agentloop.output_files import make_folder


class Ledger:
    """A file of lines that is only ever added to. A line that a crash cut short is taken away when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        make_folder(path.parent)
        with path.open("ab+") as file:
            file.seek(0)
            stored_lines = file.read()
            whole = stored_lines[: stored_lines.rfind(b"\n") + 1]
            if len(whole) < len(stored_lines):
                file.truncate(len(whole))
        self.text = whole.decode("utf-8", "replace")
        """What was there when it was opened."""

    def append(self, lines: Iterable[str]) -> None:
        """Add `lines`, each with its line break; on disk before this returns."""
        if self._file is None:
            self._file = self.path.open("ab")
        self._file.write("".join(lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
