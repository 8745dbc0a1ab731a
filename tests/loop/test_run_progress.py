"""Who follows a run sees what who drives it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentloop.loop.run_progress import LOST, RunProgress, Shown
from agentloop.progress import Progress
from agentloop.store.store import Store
from agentloop.types import Unit


class Calls:
    """See `Progress`. Keeps the sums of what it is told."""

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def start(self, stage: str, total: int) -> None:
        self.lines.append([stage, total, 0, {}])

    def advance(self, n: int = 1, **figures: float) -> None:
        self.lines[-1][2] += n
        self.lines[-1][3] = figures or self.lines[-1][3]

    def say(self, line: str) -> None:
        self.lines.append(line)


def first_half(progress: Progress) -> None:
    progress.say("it begins")
    progress.start("one", 4)
    progress.advance()
    progress.advance(3, loss=0.5)
    progress.start("two", 2)
    progress.advance(1, loss=0.25)


def second_half(progress: Progress) -> None:
    progress.advance(1)
    progress.say("it ends")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "traces" / "store.db")


def run_of(store: Store) -> tuple[int, int]:
    run = store.begin_run("loop", "loop").number
    store.put_units(run, [Unit("u", "drive")])
    return run, store.unit("u").number


def test_a_follower_sees_what_the_driver_says(store: Store) -> None:
    run, unit = run_of(store)
    seen, plain = Calls(), Calls()
    shown = Shown(seen)
    for tell in (first_half, second_half):
        tell(plain)
    with RunProgress(store, run, unit) as progress:
        first_half(progress)
        progress._write()
        shown.show(store.run(run).progress)
        shown.show(store.run(run).progress)
        second_half(progress)
    shown.show(store.run(run).progress)
    assert seen.lines == plain.lines


def test_the_next_driver_adds_to_what_was_said(store: Store) -> None:
    run, unit = run_of(store)
    with RunProgress(store, run, unit) as progress:
        first_half(progress)
    n = store.run(run).progress["n"]
    with RunProgress(store, run, unit) as progress:
        progress.say("on another machine")
    late, whole = Calls(), Calls()
    Shown(late, n).show(store.run(run).progress)
    Shown(whole).show(store.run(run).progress)
    assert late.lines == ["on another machine"]
    assert [line if isinstance(line, str) else line[0] for line in whole.lines] == [
        "it begins",
        "one",
        "two",
        "on another machine",
    ]


DRIVER = """\
import sys, time
from agentloop.loop.run_progress import RunProgress
from agentloop.store.store import Store
store = Store(sys.argv[1])
with store.driving(int(sys.argv[3]), 1), RunProgress(store, int(sys.argv[2]), int(sys.argv[3])):
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_process_that_may_not_drive_any_more_ends_itself(store: Store) -> None:
    """Also where training keeps it busy: the next driver waits for its lock."""
    run, unit = run_of(store)  # nobody has claimed it: its epoch is 0
    done = subprocess.run([sys.executable, "-c", DRIVER, str(store.path), str(run), str(unit)], timeout=30, check=False)
    assert done.returncode == LOST
