"""A simulation of workers, their database and its disk, by events in the order of their times. It measures nothing.

    unit:         wait (the episode) ─▶ event loop of its worker ─▶ group of the next commit ─▶ replaced by a new unit
    transaction:  CPU of the worker ─▶ pauses ─▶ CPU of a connection's process ─▶ flush of the log

A process does one job at a time, as Python's lock has it; the processes of a machine share its cores in turns of
QUANTUM_S. A flush covers all transactions that wait when it begins. `scale_sim.py` measures the costs and runs this.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random

QUANTUM_S = 0.002
"""Turn of a process on a core."""
GROUP_S = 0.01
"""Minimum time between the starts of two transactions of one worker: `store/commits.py` WAIT_S."""
Then = Callable[[], None]


@dataclass(frozen=True)
class Costs:
    """Service times in milliseconds."""

    loop_ms: float
    """CPU of a worker for one unit, beside its transactions."""
    worker_commit_ms: float
    """CPU of a worker for one transaction, however many units it has."""
    worker_unit_ms: float
    """CPU of a worker for each unit of a transaction."""
    database_commit_ms: float
    database_unit_ms: float
    database_leased_ms: float
    """CPU of the database in each transaction for each unit that any worker has now."""
    flush_ms: float
    """Time of a flush of the log to its disk."""
    pause_commit_ms: float = 0.0
    """Time of a transaction in which neither side computes: messages between them, and turns of other programs."""
    pause_unit_ms: float = 0.0


@dataclass(frozen=True)
class Fleet:
    """Workers and the machines they are on."""

    n_workers: int
    n_slots: int
    wait_s: float
    """Duration of an episode without the CPU of its worker: models, tools, sandboxes."""
    waits_vary: bool = False
    """Whether episodes last exponentially distributed times, instead of all the same."""
    worker_cores: float = 2.0
    """Of each worker's machine; of all workers together if they share one."""
    database_cores: float = 2.0
    round_trips_ms: float = 0.0
    """Network time of one transaction."""
    is_one_machine: bool = False
    """Workers and database share `worker_cores`."""


@dataclass(frozen=True)
class Outcome:
    """A simulated fleet, after it has warmed up."""

    per_s: float
    """Units."""
    in_system_s: float
    """Mean time of a unit from its claim to the end of its commit."""
    per_commit: float
    worker_busy: float
    """Share of its time for which a worker's process computes or is ready to."""
    worker_cores_busy: float
    database_busy: float
    flush_busy: float


class Clock:
    """Events in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Then]] = []
        self._numbers = count()

    def after(self, seconds: float, then: Then) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), then))

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now, _, then = heapq.heappop(self._events)
            then()
        self.now = until_s


class Machine:
    """Cores that processes share in turns. A part of a core is one that is slower by as much."""

    def __init__(self, clock: Clock, cores: float) -> None:
        self._clock = clock
        self._n_cores = max(1, round(cores))
        self._speed = cores / self._n_cores
        self._n_free = self._n_cores
        self._ready: deque[Process] = deque()
        self.busy_s = 0.0
        """Core-seconds used."""

    @property
    def n_cores(self) -> int:
        return self._n_cores

    def add(self, process: Process) -> None:
        self._ready.append(process)
        self._dispatch()

    def _dispatch(self) -> None:
        while self._n_free and self._ready:
            process = self._ready.popleft()
            turn_s = min(QUANTUM_S, process.jobs[0].left_s / self._speed)
            self._n_free -= 1
            self._clock.after(turn_s, lambda process=process, turn_s=turn_s: self._end(process, turn_s))  # type: ignore[misc]

    def _end(self, process: Process, turn_s: float) -> None:
        self.busy_s += turn_s
        self._n_free += 1
        job = process.jobs[0]
        job.left_s -= turn_s * self._speed
        is_over = job.left_s <= 1e-12
        if is_over:
            process.jobs.popleft()
        if process.jobs:
            self._ready.append(process)
        else:
            process.busy_s += self._clock.now - process.since
        if is_over:
            job.then()
        self._dispatch()


@dataclass
class Job:
    """CPU that a process has to use, and the event at its end."""

    left_s: float
    then: Then


@dataclass
class Process:
    """Does its jobs one after the other."""

    clock: Clock
    machine: Machine
    jobs: deque[Job] = field(default_factory=deque)
    since: float = 0.0
    """Since when it has jobs."""
    busy_s: float = 0.0

    def do(self, cost_s: float, then: Then) -> None:
        self.jobs.append(Job(cost_s, then))
        if len(self.jobs) == 1:
            self.since = self.clock.now
            self.machine.add(self)


class Disk:
    """Flushes one log. Who waits when a flush begins is covered by it."""

    def __init__(self, clock: Clock, flush_s: float) -> None:
        self._clock = clock
        self._flush_s = flush_s
        self._waiting: list[Then] = []
        self._is_busy = False
        self.busy_s = 0.0

    def flush(self, then: Then) -> None:
        self._waiting.append(then)
        if not self._is_busy:
            self._begin()

    def _begin(self) -> None:
        covered, self._waiting = self._waiting, []
        self._is_busy = True
        self._clock.after(self._flush_s, lambda: self._end(covered))

    def _end(self, covered: list[Then]) -> None:
        self.busy_s += self._flush_s
        self._is_busy = False
        if self._waiting:
            self._begin()
        for then in covered:
            then()


class Counts:
    """Of all workers, since `start`."""

    def __init__(self) -> None:
        self.start = 0.0
        self.n_units = 0
        self.n_commits = 0
        self.in_system_s = 0.0


class SimulatedWorker:
    """Has `n_slots` units at any time."""

    def __init__(self, world: World, machine: Machine) -> None:
        self._world = world
        self.process = Process(world.clock, machine)
        self._backend = Process(world.clock, world.database)
        self._ended: list[float] = []
        """When the units that wait for a commit were claimed."""
        self._next_at = 0.0
        self._is_committing = False

    def claim(self, n: int) -> None:
        for _ in range(n):
            at = self._world.clock.now
            self._world.clock.after(self._world.wait(), lambda at=at: self._end(at))  # type: ignore[misc]

    def _end(self, claimed_at: float) -> None:
        self.process.do(self._world.costs.loop_ms / 1000, lambda: self._put(claimed_at))

    def _put(self, claimed_at: float) -> None:
        self._ended.append(claimed_at)
        if not self._is_committing:
            self._is_committing = True
            clock = self._world.clock
            clock.after(max(0.0, self._next_at - clock.now), self._commit)

    def _commit(self) -> None:
        world, costs = self._world, self._world.costs
        group, self._ended = self._ended, []
        self._next_at = world.clock.now + GROUP_S
        cpu_ms = costs.worker_commit_ms + costs.worker_unit_ms * len(group)
        database_ms = costs.database_commit_ms + costs.database_unit_ms * len(group)
        database_ms += costs.database_leased_ms * world.n_leased
        pause_ms = costs.pause_commit_ms + costs.pause_unit_ms * len(group) + world.fleet.round_trips_ms
        steps: list[Callable[[Then], None]] = [
            lambda then: self.process.do(cpu_ms / 1000, then),
            lambda then: world.clock.after(pause_ms / 1000, then),
            lambda then: self._backend.do(database_ms / 1000, then),
            lambda then: world.disk.flush(then),
        ]
        in_turn(steps, lambda: self._settle(group))

    def _settle(self, group: list[float]) -> None:
        counts, clock = self._world.counts, self._world.clock
        counts.n_commits += 1
        counts.n_units += len(group)
        counts.in_system_s += sum(clock.now - at for at in group)
        self.claim(len(group))
        self._is_committing = bool(self._ended)
        if self._ended:
            clock.after(max(0.0, self._next_at - clock.now), self._commit)


def in_turn(steps: list[Callable[[Then], None]], then: Then) -> None:
    """Each step when the one before has ended."""
    if not steps:
        then()
        return
    steps[0](lambda: in_turn(steps[1:], then))


class World:
    """Everything that one simulation consists of."""

    def __init__(self, fleet: Fleet, costs: Costs, seed: int) -> None:
        self.fleet, self.costs = fleet, costs
        self.clock, self.counts = Clock(), Counts()
        self.disk = Disk(self.clock, costs.flush_ms / 1000)
        self._random = Random(seed)
        self.n_leased = fleet.n_workers * fleet.n_slots
        if fleet.is_one_machine:
            shared = Machine(self.clock, fleet.worker_cores)
            self.database, self.machines = shared, [shared]
        else:
            self.database = Machine(self.clock, fleet.database_cores)
            self.machines = [Machine(self.clock, fleet.worker_cores) for _ in range(fleet.n_workers)]
        places = [self.machines[n % len(self.machines)] for n in range(fleet.n_workers)]
        self.workers = [SimulatedWorker(self, place) for place in places]

    def wait(self) -> float:
        wait_s = self.fleet.wait_s
        return self._random.expovariate(1 / wait_s) if self.fleet.waits_vary else wait_s

    def begin(self) -> None:
        """Each worker gets its units at another moment of the first wait."""
        for worker in self.workers:
            at = self._random.uniform(0, self.fleet.wait_s)
            self.clock.after(at, lambda worker=worker: worker.claim(self.fleet.n_slots))  # type: ignore[misc]


def simulate(fleet: Fleet, costs: Costs, *, seconds: float, seed: int = 0) -> Outcome:
    """The fleet for `seconds`, after three waits and a second that do not count."""
    world = World(fleet, costs, seed)
    world.begin()
    warm_s = 3 * fleet.wait_s + 1.0
    world.clock.run(warm_s)
    world.counts = Counts()
    machines = {id(one): one for one in (*world.machines, world.database)}.values()
    before = {id(one): one.busy_s for one in machines}
    processes = sum(worker.process.busy_s for worker in world.workers)
    flushed = world.disk.busy_s
    world.clock.run(warm_s + seconds)
    counts = world.counts

    def busy(machine: Machine) -> float:
        return (machine.busy_s - before[id(machine)]) / seconds / machine.n_cores

    worker_busy = sum(worker.process.busy_s for worker in world.workers) - processes
    return Outcome(
        per_s=counts.n_units / seconds,
        in_system_s=counts.in_system_s / max(1, counts.n_units),
        per_commit=counts.n_units / max(1, counts.n_commits),
        worker_busy=worker_busy / seconds / fleet.n_workers,
        worker_cores_busy=sum(map(busy, world.machines)) / len(world.machines),
        database_busy=busy(world.database),
        flush_busy=(world.disk.busy_s - flushed) / seconds,
    )
