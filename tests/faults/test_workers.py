"""Workers that are killed or frozen at any moment lose no unit, and none has its effects twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from agentloop.store.store import Store
from agentloop.types import Unit, UnitState

pytestmark = pytest.mark.slow

PROCESS = Path(__file__).parents[1] / "work" / "process.py"
LEASE_S = 2.0


def start(where: str | Path) -> subprocess.Popen[str]:
    words = [sys.executable, str(PROCESS), str(where), str(LEASE_S)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def asked(store: Store, n: int) -> list[Unit]:
    """Units that take 20 ms and leave an effect each: a unit that nobody does."""
    units = [Unit(key=f"u{k}", kind="rollout", position=k, asks={"s": 0.02, "effect": True}) for k in range(n)]
    store.put_units(store.begin_run("run", "r").number, units)
    return units


def check(store: Store, units: list[Unit]) -> None:
    """0 lost, 0 doubled: each unit is done, and has one effect, which is that of the claim that counts."""
    done = store.units(state=UnitState.done, limit=len(units) + 1)
    assert sorted(unit.key for unit in done) == sorted(unit.key for unit in units)
    effects = store.units(state=UnitState.ready, limit=2 * len(units))
    assert Counter(unit.key for unit in effects) == {f"effect-{unit.key}-{unit.epoch}": 1 for unit in done}
    assert {unit.kind for unit in effects} <= {"effect"}


def n_ended(store: Store, units: list[Unit]) -> int:
    return len(store.unit_ends([unit.key for unit in units]))


@pytest.mark.parametrize(("n", "n_faults"), [(150, 2), pytest.param(2000, 20, marks=pytest.mark.soak, id="2000-20")])
def test_killed_and_frozen_workers_lose_and_double_nothing(where: str | Path, n: int, n_faults: int) -> None:
    """Every third fault freezes a worker for longer than its lease; it goes on when others have done its units."""
    store = Store(where)
    units = asked(store, n)
    rng = random.Random(n)
    workers = [start(where) for _ in range(2)]
    frozen: list[subprocess.Popen[str]] = []
    n_done_before = 0
    for k in range(n_faults):
        ends_at = time.monotonic() + 60
        while n_ended(store, units) < min(n - 1, n_done_before + n // (2 * n_faults)):
            assert time.monotonic() < ends_at, "nothing goes on"
            time.sleep(0.02)
        n_done_before = n_ended(store, units)
        victim = workers.pop(rng.randrange(2))
        if k % 3 == 1:
            os.kill(victim.pid, signal.SIGSTOP)
            frozen.append(victim)
        else:
            victim.kill()
            victim.communicate()
        workers.append(start(where))
    for process in frozen:
        os.kill(process.pid, signal.SIGCONT)
    ends_at = time.monotonic() + 120
    while n_ended(store, units) < n:
        assert time.monotonic() < ends_at, Counter(unit.state for unit in store.units(state=UnitState.leased))
        time.sleep(0.05)
    for process in (*workers, *frozen):
        process.send_signal(signal.SIGTERM)
    for process in (*workers, *frozen):
        process.communicate(timeout=60)
        assert process.returncode == 0
    check(store, units)
    store.close()
