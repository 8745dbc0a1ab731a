"""What a unit costs: asked for, claimed and committed 64 at a time, beside a bare loop of the same SQL.

    python benchmarks/work.py [--only sqlite|postgresql] [--n 6400] [--quick]

Both sides claim and finish the same number of bare units, whose result is one small JSON object, with full durability
(SQLite: synchronous FULL; PostgreSQL: a server of its own with fsync). The bare loop runs the same statements in the
same transactions by the driver alone, and reads and writes the same JSON: it makes no objects, shares nothing among
runs and checks nothing. Rounds take turns and their median counts. CPU is that of this process; a server's own is not
in it. Then two workers do units that wait 50 ms.

Where Redis is installed, units go end to end through a bell of Celery to a worker in another process: asked for singly,
and 16 at a time. Their CPU is that of both processes. The time from asked to begun is measured with the bell, and
without it by polling. The last line is JSON; exits 1 when a bound is missed, or when a unit is not done exactly once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from agentloop.store.claims import Claimed, Effect, Finished
from agentloop.store.portable import as_time, ask
from agentloop.store.store import Store
from agentloop.testing import postgresql, redis_server
from agentloop.types import RunState, Unit, UnitState
from agentloop.work.worker import Worker, card_of_process

K = 64
RESULT = {"reward": 1.0}
BOUNDS = {
    "sqlite_ratio": ("at most", 1.5),
    "postgresql_ratio": ("at most", 1.5),
    "sqlite_waiting_per_s": ("at least", 1000.0),
    "postgresql_waiting_per_s": ("at least", 1000.0),
    "undone": ("at most", 0.0),
}
for _store in ("sqlite", "postgresql"):
    BOUNDS |= {
        f"{_store}_bell_1_cpu_ms": ("at most", 3.0),
        f"{_store}_bell_16_cpu_ms": ("at most", 0.3),
        f"{_store}_bell_1_begun_p50_ms": ("at most", 50.0),
        f"{_store}_bell_1_begun_p95_ms": ("at most", 500.0),
        f"{_store}_poll_1_begun_p95_ms": ("at most", 2000.0),
        f"{_store}_share_without_bell": ("at least", 0.9),
    }
"""Of what is printed; the rest is for comparison."""
PRAGMAS = ("synchronous = FULL", "wal_autocheckpoint = 4000", "cache_size = -16384", "temp_store = MEMORY")
"""Those of the store, for the bare loop."""
MARKS = {"sqlite": "?", "postgresql": "%s"}
NOW = {"sqlite": "strftime('%Y-%m-%d %H:%M:%f000', 'now')", "postgresql": "now()"}


class Cost(NamedTuple):
    """One round."""

    cpu_ms: float
    """Per unit."""
    per_s: float


def units(n: int, first: int) -> list[Unit]:
    return [Unit(key=f"u{k}", kind="rollout", position=k, asks={"episode": k}) for k in range(first, first + n)]


def measured(n: int, work: Callable[[], None]) -> Cost:
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return Cost(1000 * (time.process_time() - cpu) / n, n / (time.perf_counter() - wall))


def by_claims(store: Store) -> None:
    """All units that are ready, by the store."""
    claims = store.claims(card_of_process(("rollout",), n_slots=K))
    claims.begin()
    claimed = claims.claim(K)
    while claimed:
        counts, claimed = claims.finish_and_claim([Finished(one, Effect(result=RESULT)) for one in claimed], K)
        assert all(counts)
    claims.end()


class Bare:
    """The same by the driver alone."""

    def __init__(self, where: Path | str) -> None:
        if isinstance(where, Path):
            self.dialect = "sqlite"
            self.connection: Any = sqlite3.connect(where, isolation_level=None)
            for pragma in PRAGMAS:
                self.connection.execute(f"PRAGMA {pragma}")
        else:
            import psycopg

            self.dialect = "postgresql"
            self.connection = psycopg.connect(where, autocommit=True, prepare_threshold=None)
        now, mark = NOW[self.dialect], MARKS[self.dialect]
        skip = "" if self.dialect == "sqlite" else "FOR UPDATE SKIP LOCKED"
        self.begin = "BEGIN IMMEDIATE" if self.dialect == "sqlite" else "BEGIN"
        self.queues = (
            "SELECT q.number, q.project, q.run, q.kind, q.needs, r.weight, "
            "(SELECT rank FROM unit WHERE queue = q.number AND state = 'ready' AND "
            f"(not_before IS NULL OR not_before <= {now}) ORDER BY rank, position, number LIMIT 1) "
            "FROM queue q JOIN run r ON r.number = q.run WHERE r.state = 'running' AND q.kind IN ('rollout')"
        )
        self.claim = (
            "WITH chosen AS MATERIALIZED (SELECT number AS one FROM unit WHERE queue = 1 AND state = 'ready' AND "
            f"(not_before IS NULL OR not_before <= {now}) ORDER BY rank, position, number LIMIT {K} {skip}) "
            f"UPDATE unit SET state = 'leased', epoch = epoch + 1, owner = 'bare', leased_at = {now} FROM chosen "
            "WHERE number = one RETURNING number, epoch, key, asks, limit_s, rank, position, n_lost"
        )
        row = f"(CAST({mark} AS BIGINT), CAST({mark} AS INTEGER), {mark})"
        self.finish = (
            f"UPDATE unit SET state = 'done', result = column3, error = '', ended_at = {now} FROM (VALUES {{rows}}) AS "
            "finished WHERE number = column1 AND epoch = column2 AND state IN ('ready', 'leased') RETURNING number"
        )
        self.row = row

    def run(self) -> None:
        """All units that are ready: each transaction commits some, and claims others."""
        claimed: list[Any] = []
        is_first = True
        while claimed or is_first:
            is_first = False
            self.connection.execute(self.begin)
            if claimed:
                values = [value for row in claimed for value in (row[0], row[1], orjson.dumps(RESULT).decode())]
                done = self.connection.execute(self.finish.format(rows=", ".join([self.row] * len(claimed))), values)
                assert len(done.fetchall()) == len(claimed)
            self.connection.execute(self.queues).fetchall()
            claimed = self.connection.execute(self.claim).fetchall()
            asks = [orjson.loads(row[3]) for row in claimed]
            assert len(asks) == len(claimed)
            self.connection.execute("COMMIT")


def compare(where: Path | str, n: int, n_rounds: int) -> Iterator[tuple[str, float]]:
    store = Store(where, upgrade=True)
    run = store.begin_run("run", "r").number
    bare = Bare(where)
    rounds: dict[str, list[Cost]] = {"asked": [], "claims": [], "bare": []}
    for k in range(2 * n_rounds):
        new = units(n, first=k * n)
        rounds["asked"].append(measured(n, lambda new=new: store.put_units(run, new)))
        name, work = [("claims", lambda: by_claims(store)), ("bare", bare.run)][k % 2]
        rounds[name].append(measured(n, work))
    for name, costs in rounds.items():
        yield f"{name}_cpu_ms", statistics.median(cost.cpu_ms for cost in costs)
        yield f"{name}_per_s", statistics.median(cost.per_s for cost in costs)
    pairs = zip(rounds["claims"], rounds["bare"], strict=True)
    yield "ratio", statistics.median(ours.cpu_ms / theirs.cpu_ms for ours, theirs in pairs)
    yield "undone", float(2 * n_rounds * n - len(store.unit_ends([f"u{k}" for k in range(2 * n_rounds * n)])))
    bare.connection.close()
    store.close()


class Waiting:
    """A unit that waits 50 ms."""

    async def do(self, claimed: Claimed) -> Effect:
        await asyncio.sleep(0.05)
        return Effect(result=RESULT)


async def work(where: str, broker: str) -> None:
    """A worker of the second measurement: it ends when nothing is ready."""
    store = Store(where if "://" in where else Path(where))
    bell = await listening(broker)
    worker = Worker(store, card_of_process(("rollout",), n_slots=2 * K), {"rollout": Waiting()}, bell=bell)
    running = asyncio.create_task(worker.run())
    print("up", flush=True)
    while store.units(state=UnitState.ready, limit=1):  # noqa: ASYNC110 - the store does not call
        await asyncio.sleep(0.2)
    worker.drain()
    await running
    print(worker.n_done, flush=True)


class Empty:
    """A unit that takes no time."""

    async def do(self, claimed: Claimed) -> Effect:
        return Effect(result=RESULT)


async def listening(broker: str) -> Any:
    """A bell that listens; None without a broker."""
    if not broker:
        return None
    from agentloop.work.celery_bell import CeleryBell

    bell = CeleryBell(broker, ("rollout",))
    while bell._up_since is None:
        await bell.rung(0.1)
    return bell


async def serve(where: str, broker: str) -> None:
    """A worker of the third measurement: it ends at SIGTERM, and prints its CPU seconds since it was up."""
    store = Store(where if "://" in where else Path(where))
    bell = await listening(broker)
    worker = Worker(store, card_of_process(("rollout",), n_slots=K), {"rollout": Empty()}, bell=bell)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.drain)
    running = asyncio.create_task(worker.run())
    await asyncio.sleep(1.5)
    print("up", flush=True)
    cpu = time.process_time()
    await running
    print(time.process_time() - cpu, flush=True)


def end_to_end(where: Path | str, broker: str, n: int, k: int) -> Iterator[tuple[str, float]]:
    """`n` units, asked for `k` at a time every 20 ms, and one worker."""
    from agentloop.work.celery_bell import CeleryBell

    store = Store(where)
    name = f"{'bell' if broker else 'poll'}_{k}"
    run = store.begin_run("run", name).number
    words = [sys.executable, __file__, "--serve", str(where), "--broker", broker]
    worker = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    worker.stdout.readline()
    bell = CeleryBell(broker, ()) if broker else None
    keys = [f"{name}-{j}" for j in range(n)]
    put = [Unit(key=key, kind="rollout", position=j) for j, key in enumerate(keys)]
    if bell is not None:
        bell.ring(("rollout",))
        while not bell.n_rings:  # it connects
            time.sleep(0.1)
    cpu = time.process_time()
    for first in range(0, n, k):
        store.put_units(run, put[first : first + k])
        if bell is not None:
            bell.ring(("rollout",))
        time.sleep(0.02)
    time.sleep(2.0)
    cpu = time.process_time() - cpu
    worker.send_signal(signal.SIGTERM)
    cpu += float(worker.communicate(timeout=60)[0])
    if bell is not None:
        bell.close()
    yield f"{name}_cpu_ms", 1000 * cpu / n
    yield "undone", float(n - len(store.unit_ends(keys)))
    with store._database.read() as connection:
        rows = ask(connection, f"SELECT made_at, leased_at FROM unit WHERE key LIKE '{name}-%'")
    begun = sorted((as_time(leased) - as_time(made)).total_seconds() for made, leased in rows)
    yield f"{name}_begun_p50_ms", 1000 * begun[len(begun) // 2]
    yield f"{name}_begun_p95_ms", 1000 * begun[int(0.95 * len(begun))]
    store.move_run(run, RunState.cancelled)
    store.close()


def through_bell(where: Path | str, broker: str, n: int) -> Iterator[tuple[str, float]]:
    """What a bell costs, and what it is good for."""
    yield from end_to_end(where, broker, n // 16, 1)
    yield from end_to_end(where, broker, n, 16)
    yield from end_to_end(where, "", n // 64, 1)
    figures = {name: dict(waiting(where, n, url)) for name, url in (("poll", ""), ("bell", broker))}
    yield "undone", sum(one["undone"] for one in figures.values())
    yield "share_without_bell", figures["poll"]["waiting_per_s"] / figures["bell"]["waiting_per_s"]


def waiting(where: Path | str, n: int, broker: str = "") -> Iterator[tuple[str, float]]:
    """Two workers and `n` units that wait 50 ms each."""
    store = Store(where)
    run = store.begin_run("run", f"waiting {time.time()}").number
    store.move_run(run, RunState.paused)  # until both are up
    keys = [f"w{run}-{k}" for k in range(n)]
    store.put_units(run, [Unit(key=key, kind="rollout", position=k) for k, key in enumerate(keys)])
    words = [sys.executable, __file__, "--worker", str(where), "--broker", broker]
    workers = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for worker in workers:
        assert worker.stdout is not None
        worker.stdout.readline()
    began = time.perf_counter()
    store.move_run(run, RunState.running)
    n_done = [int(worker.communicate()[0]) for worker in workers]
    ends = store.unit_ends(keys)
    with store._database.read() as connection:
        [[first, last]] = ask(connection, f"SELECT min(leased_at), max(ended_at) FROM unit WHERE key LIKE 'w{run}-%'")
    took_s = (as_time(last) - as_time(first)).total_seconds()
    assert time.perf_counter() - began >= took_s
    yield "waiting_per_s", n / took_s
    yield "share_of_one", max(n_done) / n
    yield "undone", float(n - len(ends) + abs(sum(n_done) - n))
    store.close()


@contextmanager
def places(only: str | None) -> Iterator[dict[str, Path | str]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="al-work-")))
        found: dict[str, Path | str] = {}
        if only in (None, "sqlite"):
            found["sqlite"] = folder / "store.db"
        if only in (None, "postgresql") and postgresql.binaries() is not None:
            server = stack.enter_context(postgresql.server())
            found["postgresql"] = stack.enter_context(postgresql.database(server))
        yield found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("sqlite", "postgresql"))
    parser.add_argument("--n", type=int, default=6400, help="units of one round")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--broker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        asyncio.run(work(options.worker, options.broker))
        return 0
    if options.serve:
        asyncio.run(serve(options.serve, options.broker))
        return 0
    n, n_rounds = (640, 1) if options.quick else (options.n, 5)
    figures: dict[str, float] = {"load": os.getloadavg()[0], "undone": 0.0}
    with ExitStack() as stack:
        found = stack.enter_context(places(options.only))
        broker = stack.enter_context(redis_server.redis_server()).url if redis_server.is_installed() else ""
        for name, where in found.items():
            bells = through_bell(where, broker, n) if broker else ()
            for figure, value in (*compare(where, n, n_rounds), *waiting(where, n), *bells):
                if figure == "undone":
                    figures["undone"] += value
                    continue
                figures[f"{name}_{figure}"] = round(value, 4)
                print(f"{name:12} {figure:18} {value:10.3f}", flush=True)
    figures["load_after"] = os.getloadavg()[0]
    missed = [
        name
        for name, (side, bound) in BOUNDS.items()
        if name in figures and not (figures[name] <= bound if side == "at most" else figures[name] >= bound)
    ]
    print(json.dumps({"figures": figures, "missed": missed}))
    return 1 if missed and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())
