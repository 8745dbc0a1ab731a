"""kill -9 of the process that owns a box leaves nothing that runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentloop.protocols import SandboxBackend
from agentloop.sandbox import channel
from agentloop.sandbox.pool import SandboxPool

from .processes import comes_true, with_word

REPOSITORY = Path(__file__).parents[2]


@contextmanager
def owner(kind: str, mark: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(process, box id) of a process with MARK as its argument and a box in which `sleep MARK` runs twice."""
    command = [sys.executable, "-m", "tests.sandbox.owner", kind, mark]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            word, _, box_id = process.stdout.readline().strip().partition(" ")
            assert word == "ready"
            assert comes_true(lambda: len(with_word(mark)) == 3, within_s=10.0), "the box runs nothing"
            yield process, box_id
        finally:
            process.kill()


def doors_of(pid: int) -> list[Path]:
    return list(channel.DOORS.glob(f"agentloop-{pid}-*"))


def test_killed_owner_leaves_no_process(backend: SandboxBackend) -> None:
    mark = f"77{os.getpid()}.5"
    with owner(backend.name, mark) as (process, _):
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert comes_true(lambda: not with_word(mark)), f"still running: {with_word(mark)}"


def test_what_a_killed_owner_left_is_swept_at_the_next_start(backend: SandboxBackend) -> None:
    mark = f"78{os.getpid()}.5"
    with owner(backend.name, mark) as (process, _):
        SandboxPool(backend)
        assert len(doors_of(process.pid)) == 1, "the folder of a living owner was swept"
        process.send_signal(signal.SIGKILL)
        process.wait()
    left = [path for door in doors_of(process.pid) for path in door.rglob("*") if not path.is_dir()]
    assert left == []
    SandboxPool(backend)
    assert doors_of(process.pid) == []


@pytest.mark.parametrize(
    "name", ["agentloop-notes-2024", "agentloop-", "agentloop-1-x", "agentloop-99999999999999999999-x"]
)
def test_the_sweep_touches_nothing_else(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "DOORS", tmp_path)
    (tmp_path / name).mkdir()
    channel.sweep_doors()
    assert (tmp_path / name).exists()
