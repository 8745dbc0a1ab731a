"""What a claim takes in a store with half a million units that are done, while more and more are.

    python benchmarks/workers_history.py [--store sqlite|postgresql] [--minutes 10] [--per-s 500] [--history 500000]

Two processes claim up to 64 units at a time and commit them, every 50 ms; this process asks for 500 units a second. The
history is written by SQL before. The p95 of a claim in the last minute stands beside that of the first minute. After
each claim the same process makes a transaction that reads nothing: what that takes longer at the end is the machine.
`--minutes 1` gives a quick look: below three minutes, the first and the last third are compared. The last line is JSON;
exits 1 when claims take more than twice as long at the end, or when a unit is not done.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fleet
from sqlalchemy import Connection
from work import places

from agentloop.store.claims import Effect, Finished
from agentloop.store.portable import ask, in_transaction
from agentloop.store.store import Store
from agentloop.types import Unit
from agentloop.work.worker import card_of_process

PERIOD_S = 0.05
K = 64
BOUNDS: fleet.Bounds = {}
for _store in ("sqlite", "postgresql"):
    BOUNDS |= {f"{_store}_p95_ratio": ("at most", 2.0), f"{_store}_undone": ("at most", 0.0)}
NUMBERS = {
    "sqlite": "WITH RECURSIVE numbers(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM numbers WHERE k < $1)",
    "postgresql": "WITH numbers(k) AS (SELECT generate_series(1, CAST($1 AS BIGINT)))",
}
INTO = (
    "INSERT INTO unit (project, key, queue, state, rank, position, limit_s, asks, epoch, n_deaths, n_lost, owner, "
    "result, error, history, made_at, leased_at, ended_at)"
)
FACTS = (
    "SELECT $2, 'old-' || CAST(k AS TEXT), $3, 'done', 0, k, 3600.0, '{}', 1, 0, 0, 'old', '{\"reward\": 1.0}', '', "
    "'[]', {now}, {now}, {now} FROM numbers"
)
"""Units that are done, with the rows that claims and commits would have left."""


def fill(store: Store, run: int, n: int) -> None:
    """A history of `n` units in the queue of `run`."""
    store.put_units(run, [Unit(key=f"first-{run}", kind=fleet.KIND)])

    def write(connection: Connection) -> None:
        [[queue]] = ask(connection, "SELECT number FROM queue WHERE run = $1", (run,))
        numbers = NUMBERS["sqlite" if store._database.is_sqlite else "postgresql"]
        ask(connection, f"{INTO} {numbers} {FACTS}", (n, store.project, queue))

    in_transaction(store._database, write)


def claim(where: str, seconds: float) -> None:
    """A process that claims and commits.

    It prints for each claim that got units its moment, its duration, and that of a transaction that reads nothing.
    """
    store = Store(where if "://" in where else Path(where))
    claims = store.claims(card_of_process((fleet.KIND,), n_slots=K))
    claims.begin()
    took: list[tuple[float, float, float]] = []
    next_at = began = time.monotonic()
    while time.monotonic() < began + seconds:
        before = time.perf_counter()
        claimed = claims.claim(K)
        if claimed:
            after = time.perf_counter()
            fleet.rows(store, "SELECT 1")
            took.append((after, 1000 * (after - before), 1000 * (time.perf_counter() - after)))
            claims.finish([Finished(one, Effect(fleet.RESULT)) for one in claimed])
        next_at += PERIOD_S
        time.sleep(max(0.0, next_at - time.monotonic()))
    claims.end()
    store.close()
    print(json.dumps(took))


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


def measure(where: Path | str, minutes: float, per_s: int, n_history: int) -> Iterator[tuple[str, float]]:
    store = Store(where, upgrade=True)
    run = store.begin_run("run", "history").number
    began = time.monotonic()
    fill(store, run, n_history)
    yield "fill_s", time.monotonic() - began
    seconds = 60 * minutes
    words = [sys.executable, __file__, "--claim", str(where), "--minutes", str(minutes + 5 / 60)]
    claimers = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    time.sleep(1.0)
    began = time.monotonic()
    n = 0
    while (now := time.monotonic()) < began + seconds:
        wanted = int(per_s * (now - began))
        fleet.put(store, run, "new", wanted - n, first=n)
        n = wanted
        time.sleep(0.1)
    took = [one for claimer in claimers for one in json.loads(claimer.communicate()[0])]
    window_s = 60.0 if minutes >= 3 else seconds / 3
    first, last = (edge(at for at, _, _ in took) for edge in (min, max))
    yield "per_s", n / seconds
    yield "claims", len(took)
    for name, column in (("p95", 1), ("nothing_p95", 2)):
        early = p95([one[column] for one in took if one[0] < first + window_s])
        late = p95([one[column] for one in took if one[0] > last - window_s])
        yield f"first_{name}_ms", early
        yield f"last_{name}_ms", late
        yield f"{name}_ratio", late / early
    found = fleet.counts(store, run)
    yield "done", found["done"]
    yield "undone", sum(found.values()) - found["done"]
    store.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=("sqlite", "postgresql"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--per-s", type=int, default=500)
    parser.add_argument("--history", type=int, default=500_000)
    parser.add_argument("--claim", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.claim:
        claim(options.claim, 60 * options.minutes)
        return 0
    figures: dict[str, float] = {"load": os.getloadavg()[0], "minutes": options.minutes, "history": options.history}
    for only in (options.store,) if options.store else ("sqlite", "postgresql"):
        with places(only) as found:
            for name, where in found.items():
                for figure, value in measure(where, options.minutes, options.per_s, options.history):
                    figures[f"{name}_{figure}"] = value
                    print(f"{name:12} {figure:14} {value:12.3f}", flush=True)
    figures["load_after"] = os.getloadavg()[0]
    return fleet.report(figures, BOUNDS)


if __name__ == "__main__":
    sys.exit(main())
