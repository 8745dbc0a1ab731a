"""A stage of the loop that is killed and started again asks for the attempts that are missing, and for no other."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from loop.mini import N_HELDOUT, N_TRAIN, make_mini

from agentloop.config.settings import STORE
from agentloop.store.store import Store

from .command import Running

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("bubblewrap")]

SETTINGS = '[project]\nname = "mini"\nsuite = "evals/mini"\n[policy]\nkind = "scripted"\nscript = "asks.py:make"\n'
GATE = "[gate]\ntrials = 2\n"
ASKS = '''\
"""Reads the file that it is asked for, and notes each request."""
import time
from pathlib import Path

from agentloop.policies.scripted import ScriptedPolicy, call_message


def make(tasks):
    def script(messages, rng):
        with Path("requests.log").open("a") as log:
            log.write(f"{messages[0].content} {rng.random()} {len(messages)}\\n")
        time.sleep(0.02)
        if messages[-1].role == "tool":
            return call_message("submit", answer=messages[-1].content.strip())
        return call_message("shell", command=f"cat {messages[0].content.split()[-1][:-1]}")

    return ScriptedPolicy(script, name="asks")
'''
N_ATTEMPTS, N_REQUESTS = N_TRAIN + 2 * N_HELDOUT, 2
"""Attempts of the loop, and requests of each."""


def lay(folder: Path) -> Path:
    make_mini(folder)
    (folder / "agentloop.toml").write_text(SETTINGS + GATE)
    (folder / "asks.py").write_text(ASKS)
    return folder


def requests(folder: Path) -> list[str]:
    log = folder / "requests.log"
    return log.read_text().splitlines() if log.exists() else []


def stored(folder: Path) -> list[tuple[str, int | None, str, float | None]]:
    """(stage, position, episode, reward) of each attempt on disk, in order."""
    store = Store(folder / STORE, create=False)
    try:
        rows = store.find_traces(limit=1000)
        return sorted((str(row.stage), row.n, str(row.episode_id), row.reward) for row in rows)
    finally:
        store.close()


def test_a_killed_stage_goes_on_with_the_missing_attempts(tmp_path: Path) -> None:
    whole = lay(tmp_path / "whole")
    status, _ = Running("loop", ".", "--sandbox", "bubblewrap", cwd=whole).finish()
    assert (status, len(requests(whole))) == (0, N_REQUESTS * N_ATTEMPTS)
    cut = lay(tmp_path / "cut")
    for n_more in (30, 40):
        n_committed = len(stored(cut)) if (cut / STORE).exists() else 0
        n_before = len(requests(cut))
        running = Running("loop", ".", "--sandbox", "bubblewrap", cwd=cut)
        end = time.monotonic() + 60
        while len(requests(cut)) < n_before + n_more and time.monotonic() < end and running.process.poll() is None:
            time.sleep(0.01)
        assert running.end(signal.SIGKILL)[0] == -signal.SIGKILL
        assert len(stored(cut)) > n_committed, "attempts are committed while their stage is under way"
    committed, n_before = stored(cut), len(requests(cut))
    assert len(committed) < N_ATTEMPTS
    status, _ = Running("loop", ".", "--sandbox", "bubblewrap", cwd=cut).finish()
    assert status == 0
    assert len(requests(cut)) - n_before == N_REQUESTS * (N_ATTEMPTS - len(committed))
    assert set(committed) <= set(stored(cut)), "nothing that was committed has changed"
    assert stored(cut) == stored(whole)
