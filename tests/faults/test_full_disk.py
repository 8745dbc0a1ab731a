"""A disk that fills up ends the command in one line; with space again, the same command goes on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import parts
import pytest
from loop.mini import N_HELDOUT, N_TRAIN, make_mini

from .command import Running, left_over

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("bubblewrap")]


N_TRIALS = 8
"""More attempts than the disk holds."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with parts.small_disk(tmp_path / "disk", "1m") as folder:
        yield folder


def test_a_full_disk_ends_in_one_line_and_more_space_lets_it_go_on(small_disk: Path) -> None:
    folder = make_mini(small_disk / "mini")
    env = {"AGENTLOOP_GATE__TRIALS": str(N_TRIALS)}
    loop = ("loop", folder, "--sandbox", "bubblewrap", "--json")
    running = Running(*loop, cwd=small_disk.parent, **env)
    status, shown = running.finish()
    errors = [line for line in running.said if line.startswith("error: ")]
    assert (status, shown) == (4, ""), running.said
    assert errors == [
        f"error: {folder}/traces/store.db: database or disk is full; "
        "free some space there, then run the same command again: it continues\n"
    ]
    assert running.said[-1:] == errors
    assert left_over(folder, []) == []

    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    again = Running(*loop, cwd=small_disk.parent, **env)
    status, shown = again.finish()
    assert status == 0, again.said
    assert json.loads(shown)["episodes"] == N_TRAIN + N_TRIALS * N_HELDOUT


def test_a_disk_too_small_for_the_project_leaves_nothing_of_it(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(b"x" * 700_000)
    running = Running("demo", "--sandbox", "bubblewrap", "--out", small_disk / "demo", cwd=small_disk.parent)
    status, _ = running.finish()
    assert status == 2
    assert len(running.said) == 1
    assert "No space left on device" in running.said[0]
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]
