"""`agentloop` as a process that can be watched and ended, and what it leaves on the machine."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from parts import children

COMMAND = (str(Path(sys.executable).with_name("agentloop")),)
BRIEF = (sys.executable, str(Path(__file__).with_name("brief.py")))
"""The same command with a warm start of few steps; see `brief.py`."""
SECONDS = 300.0
"""How long a line may take to come, on a machine that has much else to do."""


class Running:
    """One command; `wait_for` reads what it says on stderr."""

    def __init__(self, *arguments: str | Path, cwd: Path, program: Sequence[str] = COMMAND, **env: str) -> None:
        self.process = subprocess.Popen(
            [*program, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, **env},
            start_new_session=True,
        )
        self.said: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, words: str) -> None:
        """Until a line has `words`. AssertionError when the command ends first."""
        while (line := self._lines.get(timeout=SECONDS)) is not None:
            self.said.append(line)
            if words in line:
                return
        self.finish()
        raise AssertionError(f"ended without saying {words!r}:\n{''.join(self.said)}")

    def end(self, signal: int) -> tuple[int, list[int]]:
        """Send a signal; (exit status, processes that were below it at that moment)."""
        below = children(self.process.pid)
        self.process.send_signal(signal)
        return self.finish()[0], below

    def finish(self) -> tuple[int, str]:
        """Wait for the end; (exit status, stdout)."""
        assert self.process.stdout is not None
        shown = self.process.stdout.read()
        status = self.process.wait(timeout=SECONDS)
        self._reader.join(SECONDS)
        self.said += [line for line in self._lines.queue if line is not None]
        self.process.stdout.close()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status, shown


def left_over(folder: Path, below: list[int], within_s: float = 10.0) -> list[int]:
    """Of `below` and whatever names `folder` among its arguments: those that still live after the time is up."""
    end = time.monotonic() + within_s
    while (alive := [*filter(_alive, below), *_naming(folder)]) and time.monotonic() < end:
        time.sleep(0.05)
    return alive


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _naming(folder: Path) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if f"{folder}/".encode() in words and int(process.name) != os.getpid():
            found.append(int(process.name))
    return found
