"""How many episodes at once workers and one PostgreSQL hold, and what gives out first: measured, checked, extrapolated.

    python benchmarks/scale_sim.py [--quick] [--episode-s 60] [--worker-slots 256] [--worker-cores 4] ...

1. It measures the service times on this machine: CPU of a worker and of PostgreSQL for a transaction, for each unit of
   it and for each unit that is in progress anywhere; the flush of the log; and the event loop of one worker.
2. It measures the throughput of two and of four workers whose units wait 50 ms, simulates the same with the service
   times of step 1 (`scale_model.py`), and ends with 1 if one differs by more than 15%.
3. Only then it simulates 1,000, 10,000 and 100,000 episodes at once on machines of the given size, and names the
   part that uses most of its capacity. Episodes leave a trace of three steps. An agent's own CPU is `--agent-cpu-ms`.

The times of step 1 are measured before and after each run of step 2, because other programs may use the machine, too:
the pauses of a transaction have the turns that those took. Prices are options: `--core-hour-usd`, `--gpu-hour-usd`,
`--episodes-per-gpu-hour`. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import fleet
from ingest import cpu_s
from scale_model import Costs, Fleet, simulate
from scale_plan import conclude, differs_by, parsed
from workers import placed

from agentloop.store.claims import Claims, Effect, Finished
from agentloop.store.store import Store
from agentloop.testing import postgresql
from agentloop.types import RunState
from agentloop.work.worker import card_of_process

SIZES = (1, 8, 32)
"""Units in a transaction, for the fit of its costs."""
WAIT_S, SLOTS = 0.05, 16
N_LEASED = 50_000
CONNECTIONS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


class Cost(NamedTuple):
    """CPU and duration of one transaction, in ms."""

    worker: float
    database: float
    wall: float


class Server:
    """PostgreSQL's processes."""

    def __init__(self, url: str) -> None:
        self.folder = Path(url.partition("host=")[2].partition("&")[0])
        self._parent = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])

    def pids(self) -> list[int]:
        children = Path(f"/proc/{self._parent}/task/{self._parent}/children").read_text().split()
        return [self._parent, *map(int, children)]

    def cpu_s(self) -> float:
        """Of all its processes, those that have ended included."""
        columns = Path(f"/proc/{self._parent}/stat").read_text().rpartition(")")[2].split()
        ended = (int(columns[13]) + int(columns[14])) / os.sysconf("SC_CLK_TCK")
        return ended + sum(map(cpu_s, self.pids()))


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(value at 0, slope), by least squares, neither below 0."""
    slope, start = statistics.linear_regression(*zip(*points, strict=True))
    return max(0.0, start), max(0.0, slope)


# -------------------------------------------------------------------------------------------- measuring


def transactions(store: Store, server: Server, claims: Claims, run: int, size: int, n: int, leaves: str) -> Cost:
    """The mean of `n` transactions that commit and claim `size` units."""
    fleet.put(store, run, f"{leaves}-{size}-{time.time_ns()}", size * (n + 1))
    claimed = claims.claim(size)
    worker_s = wall_s = 0.0
    before_s = server.cpu_s()
    for _ in range(n):
        traces = leaves == "trace"
        ended = [
            Finished(one, Effect(fleet.RESULT, (placed(run, one.unit.key, one.unit.position),) if traces else ()))
            for one in claimed
        ]
        cpu, wall = time.process_time(), time.perf_counter()
        _, claimed = claims.finish_and_claim(ended, size)
        worker_s += time.process_time() - cpu
        wall_s += time.perf_counter() - wall
    database_s = server.cpu_s() - before_s
    claims.finish([Finished(one, Effect(fleet.RESULT)) for one in claimed])
    return Cost(1000 * worker_s / n, 1000 * database_s / n, 1000 * wall_s / n)


def measured_costs(url: str, leaves: str, n: int) -> Costs:
    """Service times of transactions; `loop_ms` is added by `with_loop`."""
    store, server = Store(url, upgrade=True), Server(url)
    run = store.begin_run("run", f"costs {leaves}").number
    claims = store.claims(card_of_process((fleet.KIND,), n_slots=64))
    claims.begin()
    transactions(store, server, claims, run, 8, 20, leaves)  # caches
    found = [(size, transactions(store, server, claims, run, size, n, leaves)) for size in SIZES]
    worker = line([(size, cost.worker) for size, cost in found])
    database = line([(size, cost.database) for size, cost in found])
    flush = flush_ms(server.folder)
    pause = line([(size, max(0.0, cost.wall - cost.worker - cost.database - flush)) for size, cost in found])
    store.move_run(run, RunState.done)
    claims.end()
    store.close()
    return Costs(0.0, *worker, *database, 0.0, flush, *pause)


def flush_ms(folder: Path) -> float:
    """The median time of a flush of one page of a log to the disk of `folder`."""
    page, took = bytes(8192), []
    with tempfile.TemporaryFile(dir=folder) as log:
        log.write(bytes(1 << 22))
        for n in range(100):
            log.seek(n * len(page))
            log.write(page)
            log.flush()
            began = time.perf_counter()
            os.fdatasync(log.fileno())
            took.append(time.perf_counter() - began)
    return 1000 * statistics.median(took)


def leased_ms(url: str, n: int) -> float:
    """CPU-ms of PostgreSQL in each transaction for each unit in progress, where several runs have ready units."""
    store, server = Store(url, upgrade=True), Server(url)
    run = store.begin_run("run", "leased").number
    mine, others = (store.claims(card_of_process((fleet.KIND,), n_slots=k)) for k in (64, N_LEASED))
    mine.begin()
    others.begin()
    without = transactions(store, server, mine, run, 1, n, "row").database
    fleet.put(store, run, "leased", N_LEASED)
    while others.claim(5000):
        pass
    fleet.put(store, store.begin_run("run", "another").number, "another", 2 * n)
    beside = transactions(store, server, mine, run, 1, n, "row").database
    store.move_run(run, RunState.cancelled)
    store.close()
    return max(0.0, beside - without) / N_LEASED


class Run(NamedTuple):
    """A measured fleet."""

    per_s: float
    cpu_ms: float
    """CPU of its workers for one unit."""
    per_commit: float
    connections: float
    """Of each worker to the server."""


def measured(url: str, n_workers: int, seconds: float, leaves: str) -> Run:
    """Workers of this machine whose units wait WAIT_S, for about `seconds`."""
    store = Store(url, upgrade=True)
    run, _ = fleet.held_back(store, f"{n_workers}-{leaves}", round(n_workers * SLOTS / WAIT_S * (seconds + 3)))
    words = ("--slots", SLOTS, "--wait-s", WAIT_S, "--leaves", leaves)
    with fleet.fleet(n_workers, url, *words) as members:
        store.move_run(run, RunState.running)
        time.sleep(1.5)  # workers look for units once a second
        began, before = time.perf_counter(), done(store, run)
        time.sleep(seconds)
        per_s = (done(store, run) - before) / (time.perf_counter() - began)
        [[n_connections]] = fleet.rows(store, CONNECTIONS)
        store.move_run(run, RunState.cancelled)
        facts = [member.end() for member in members]
    n_done = done(store, run)
    store.close()
    cpu_ms = 1000 * sum(one["cpu_s"] for one in facts) / n_done
    return Run(per_s, cpu_ms, n_done / sum(one["n_commits"] for one in facts), n_connections / n_workers)


def done(store: Store, run: int) -> int:
    return fleet.counts(store, run).get("done", 0)


def with_loop(costs: Costs, one: Run) -> Costs:
    """With the CPU of a worker that its transactions do not explain."""
    explained_ms = costs.worker_unit_ms + costs.worker_commit_ms / one.per_commit
    return replace(costs, loop_ms=max(0.0, one.cpu_ms - explained_ms))


# -------------------------------------------------------------------------------------------- simulating


def here(n_workers: int) -> Fleet:
    """The fleet of `measured`."""
    return Fleet(n_workers, SLOTS, WAIT_S, worker_cores=os.cpu_count() or 1, is_one_machine=True)


def mean(*costs: Costs) -> Costs:
    """Of each service time."""
    return Costs(**{one.name: statistics.fmean(getattr(cost, one.name) for cost in costs) for one in fields(Costs)})


# -------------------------------------------------------------------------------------------- main


@contextmanager
def database() -> Iterator[Callable[[], str]]:
    """Makes new databases on a server of its own."""
    with ExitStack() as stack:
        server = stack.enter_context(postgresql.server())
        yield lambda: stack.enter_context(postgresql.database(server))


def checked(new: Callable[[], str], leaves: str, n: int, seconds: float) -> Iterator[tuple[str, Any]]:
    """The costs of units that leave a row or a trace, and the check for two and four workers."""
    costs = [measured_costs(new(), leaves, n)]
    one = measured(new(), 1, seconds, leaves)
    costs.append(measured_costs(new(), leaves, n))
    loop_ms = with_loop(mean(*costs), one).loop_ms
    for n_workers in (2, 4):
        run = measured(new(), n_workers, seconds, leaves)
        costs.append(measured_costs(new(), leaves, n))
        around = replace(mean(*costs[-2:]), loop_ms=loop_ms)
        simulated = simulate(here(n_workers), around, seconds=10.0).per_s
        share = differs_by(simulated, run.per_s)
        facts = {"measured_per_s": run.per_s, "simulated_per_s": simulated, "differs_by": share}
        yield f"{leaves}_{n_workers}_workers", {name: round(value, 3) for name, value in facts.items()}
        yield "connections_per_worker", run.connections
    yield leaves, {name: round(value, 4) for name, value in vars(replace(mean(*costs), loop_ms=loop_ms)).items()}


def main() -> int:
    options = parsed(__doc__ or "")
    if postgresql.binaries() is None:
        print(f"no PostgreSQL here. Remedy: {postgresql.REMEDY}", file=sys.stderr)
        return 2
    n, seconds = (60, 4.0) if options.quick else (200, 12.0)
    report: dict[str, Any] = {"load": os.getloadavg()[0]}
    with database() as new:
        for leaves in ("row", "trace"):
            for name, value in checked(new, leaves, n, seconds):
                report[name] = value
                print(name, value, flush=True)
        report["leased_ms"] = round(leased_ms(new(), n), 6)
    code = conclude(report, options)
    report["options"] = {name: value for name, value in vars(options).items() if name != "quick"}
    report["load_after"] = os.getloadavg()[0]
    print(json.dumps(report))
    return code


if __name__ == "__main__":
    sys.exit(main())
