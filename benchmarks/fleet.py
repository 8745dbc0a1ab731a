"""Workers in processes of their own, for the benchmarks of scale: their units wait, and leave a row or a trace.

    python benchmarks/fleet.py STORE [--wait-s 0.05] [--slots 64] [--leaves row|trace] [--lease-s 15]

A process begins when it reads a line, prints the id of its worker, and drains at SIGTERM. Then it prints a line of JSON
about itself. `workers.py`, `workers_network.py` and `scale_sim.py` start them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from store import attempt

from agentloop.store.attempts import Placed
from agentloop.store.claims import Claimed, Effect
from agentloop.store.portable import as_time, ask
from agentloop.store.store import Store
from agentloop.types import RunState, Unit
from agentloop.work.worker import Worker, card_of_process

KIND = "rollout"
RESULT = {"reward": 1.0}
END_S = 60.0
"""Maximum wait for a worker to end."""
Bounds = dict[str, tuple[str, float]]
"""Figure -> `at most` or `at least`, and the bound."""


class Waiting:
    """Units that wait, and leave a row or a trace of three steps."""

    def __init__(self, wait_s: float, leaves: str) -> None:
        self._wait_s = wait_s
        self._leaves_trace = leaves == "trace"

    async def do(self, claimed: Claimed) -> Effect:
        await asyncio.sleep(self._wait_s)
        if not self._leaves_trace:
            return Effect(result=RESULT)
        unit = claimed.unit
        placed = Placed(f"run-{claimed.run}", unit.position, attempt(unit.key, unit.position))
        return Effect(result=RESULT, attempts=(placed,))


async def serve(options: argparse.Namespace) -> None:
    """One worker, until SIGTERM."""
    sys.stdin.readline()
    store = Store(options.store if "://" in options.store else Path(options.store))
    card = card_of_process((KIND,), n_slots=options.slots, lease_s=options.lease_s)
    worker = Worker(store, card, {KIND: Waiting(options.wait_s, options.leaves)})
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.drain)
    running = asyncio.create_task(worker.run())
    while not running.done() and all(one.id != card.id for one in store.workers()):  # noqa: ASYNC110 - the store does not call
        await asyncio.sleep(0.02)
    print(card.id, flush=True)
    cpu_s = time.process_time()
    await running
    facts = {"n_done": worker.n_done, "cpu_s": time.process_time() - cpu_s, "n_commits": worker._commits.n_commits}
    print(json.dumps(facts), flush=True)


class Member(NamedTuple):
    """A worker of a fleet."""

    process: subprocess.Popen[str]
    id: str

    def end(self) -> dict[str, Any]:
        """Let it drain. Returns what it says of itself."""
        self.process.send_signal(signal.SIGTERM)
        facts: dict[str, Any] = json.loads(self.process.communicate(timeout=END_S)[0])
        return facts


def start(where: Path | str, *words: object, inside: Sequence[str] = ()) -> subprocess.Popen[str]:
    """A process of a worker, which waits for `begin`. inside: a command that runs it."""
    command = [*inside, sys.executable, __file__, str(where), *map(str, words)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def begin(process: subprocess.Popen[str]) -> Member:
    """The worker of a process, once the store knows it."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return Member(process, process.stdout.readline().strip())


@contextmanager
def fleet(n: int, where: Path | str, *words: object) -> Iterator[list[Member]]:
    """`n` workers, which are killed at the end of the block if they still run."""
    with ExitStack() as stack:
        processes = [start(where, *words) for _ in range(n)]
        for process in processes:
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield [begin(process) for process in processes]


def put(store: Store, run: int, name: str, n: int, *, first: int = 0) -> list[str]:
    """Ask for `n` units. Returns their keys."""
    units = [Unit(key=f"{name}-{k}", kind=KIND, position=k) for k in range(first, first + n)]
    for at in range(0, n, 1000):
        store.put_units(run, units[at : at + 1000])
    return [unit.key for unit in units]


def held_back(store: Store, name: str, n: int) -> tuple[int, list[str]]:
    """A run of `n` units that no worker begins before the run is moved to `running`."""
    run = store.begin_run("run", f"{name} {time.time_ns()}").number
    store.move_run(run, RunState.paused)
    return run, put(store, run, f"{name}-{run}", n)


def rows(store: Store, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """Of one statement."""
    with store._database.read() as connection:
        return ask(connection, statement, values)


def counts(store: Store, run: int) -> dict[str, int]:
    """State -> number of units of a run."""
    found = rows(store, f"SELECT state, count(*) FROM unit {OF_RUN} GROUP BY state", (run,))
    return {str(state): int(n) for state, n in found}


OF_RUN = "WHERE queue IN (SELECT number FROM queue WHERE run = $1)"


def wait_for_end(store: Store, run: int, timeout_s: float) -> None:
    """Return when no unit of the run is ready or leased. Raises TimeoutError."""
    ends_at = time.monotonic() + timeout_s
    unfinished = f"SELECT 1 FROM unit {OF_RUN} AND state IN ('ready', 'leased') LIMIT 1"
    while rows(store, unfinished, (run,)):
        if time.monotonic() > ends_at:
            raise TimeoutError(f"run {run} did not end within {timeout_s:g} s: {counts(store, run)}")
        time.sleep(0.1)


def ended_after_s(store: Store, run: int) -> list[float]:
    """For each unit, in order, the seconds from the run's first lease to its end."""
    [[first]] = rows(store, f"SELECT min(leased_at) FROM unit {OF_RUN}", (run,))
    ends = rows(store, f"SELECT ended_at FROM unit {OF_RUN} AND state = 'done' ORDER BY ended_at", (run,))
    began = as_time(first)
    return [(as_time(end) - began).total_seconds() for (end,) in ends]


def steady_per_s(ends: Sequence[float]) -> float:
    """Units a second between the first and the last fifth of them: without the start, and without the last wave."""
    a, b = len(ends) // 5, 4 * len(ends) // 5
    return (b - a) / (ends[b] - ends[a])


def missed(figures: dict[str, float], bounds: Bounds) -> list[str]:
    """Figures outside of their bounds."""
    return [
        name
        for name, (side, bound) in bounds.items()
        if name in figures and not (figures[name] <= bound if side == "at most" else figures[name] >= bound)
    ]


def report(figures: dict[str, float], bounds: Bounds) -> int:
    """Print the table and the line of JSON. Returns the exit code."""
    outside = missed(figures, bounds)
    for name, value in figures.items():
        bound = " ".join(map(str, bounds[name])) if name in bounds else ""
        print(f"{name:44} {value:12.3f}  {bound}{'  MISSED' if name in outside else ''}")
    print(json.dumps({"figures": {name: round(value, 4) for name, value in figures.items()}, "missed": outside}))
    return 1 if outside else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--wait-s", type=float, default=0.05)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--leaves", choices=("row", "trace"), default="row")
    parser.add_argument("--lease-s", type=float, default=15.0)
    asyncio.run(serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
