"""The simulation of workers obeys the laws of queues, which are formulas of textbooks and not ours."""

from __future__ import annotations

import sys
from dataclasses import replace
from math import exp
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from scale_model import GROUP_S, Clock, Costs, Disk, Fleet, Machine, Process, simulate

FREE = Costs(0, 0, 0, 0, 0, 0, 0)
ALONE = Fleet(n_workers=1, n_slots=1, wait_s=1.0, worker_cores=1, database_cores=1)


def test_one_server_and_nothing_else_serves_one_job_per_service_time() -> None:
    """X = 1/s."""
    busy = replace(FREE, database_unit_ms=4.0)
    outcome = simulate(replace(ALONE, n_workers=50, wait_s=0.01), busy, seconds=20)
    assert outcome.per_s == pytest.approx(1 / 0.004, rel=0.02)
    assert outcome.database_busy == pytest.approx(1.0, rel=0.02)


def test_without_queues_a_fleet_does_its_slots_in_each_wait() -> None:
    """X = N / (Z + R), here with R = 0, because the interval of commits is shorter than the wait."""
    outcome = simulate(replace(ALONE, n_workers=3, n_slots=7), FREE, seconds=100)
    assert outcome.per_s == pytest.approx(21.0, rel=0.02)


@pytest.mark.parametrize("n_slots", [4, 40, 160])
def test_littles_law(n_slots: int) -> None:
    """N = X * R: the units in the system are the rate times the time that each spends there."""
    costs = Costs(1.0, 0.5, 0.2, 0.7, 0.3, 0.0, 3.0)
    fleet = Fleet(2, n_slots, wait_s=0.05, waits_vary=True, worker_cores=2, is_one_machine=True)
    outcome = simulate(fleet, costs, seconds=30)
    assert outcome.per_s * outcome.in_system_s == pytest.approx(2 * n_slots, rel=0.03)


def test_the_utilisation_law() -> None:
    """U = X * S, for each server."""
    costs = Costs(1.0, 0.5, 0.2, 0.7, 0.3, 0.001, 3.0)
    outcome = simulate(Fleet(2, 10, wait_s=0.1, waits_vary=True, database_cores=2), costs, seconds=30)
    commits = outcome.per_s / outcome.per_commit
    worker_s = outcome.per_s * 0.0012 + commits * 0.0005
    database_s = outcome.per_s * 0.0003 + commits * (0.0007 + 20 * 0.000001)
    assert outcome.worker_cores_busy == pytest.approx(worker_s / 4, rel=0.02), "two machines of two cores"
    assert outcome.database_busy == pytest.approx(database_s / 2, rel=0.02)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_a_process_is_a_queue_with_poisson_arrivals(load: float) -> None:
    """M/D/1: the mean wait is load * s / (2 * (1 - load)); Pollaczek-Khinchine."""
    service_s, n = 0.001, 40_000
    clock = Clock()
    process = Process(clock, Machine(clock, 1))
    random = Random(1)
    waits: list[float] = []

    def arrive(left: int) -> None:
        at = clock.now
        process.do(service_s, lambda: waits.append(clock.now - at - service_s))
        if left:
            clock.after(random.expovariate(load / service_s), lambda: arrive(left - 1))

    arrive(n)
    clock.run(1e6)
    assert len(waits) == n + 1
    assert sum(waits) / len(waits) == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.08)


def test_processes_of_a_machine_share_its_cores_and_one_uses_no_more_than_one() -> None:
    clock = Clock()
    machine = Machine(clock, 2)
    ends: list[float] = []
    for _ in range(4):
        Process(clock, machine).do(1.0, lambda: ends.append(clock.now))
    single = Machine(clock, 2)
    one = Process(clock, single)
    for _ in range(2):
        one.do(1.0, lambda: ends.append(clock.now))
    clock.run(10)
    assert sorted(ends) == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0, 2.0], abs=0.01)


def test_half_a_core_takes_twice_as_long() -> None:
    clock = Clock()
    ends: list[float] = []
    Process(clock, Machine(clock, 0.5)).do(1.0, lambda: ends.append(clock.now))
    clock.run(10)
    assert ends == pytest.approx([2.0])


def test_a_flush_covers_all_that_wait_when_it_begins() -> None:
    clock = Clock()
    disk = Disk(clock, 1.0)
    ends: list[tuple[str, float]] = []
    for name, at in (("a", 0.0), ("b", 0.2), ("c", 0.9), ("d", 1.5)):
        clock.after(at, lambda name=name: disk.flush(lambda: ends.append((name, clock.now))))  # type: ignore[misc]
    clock.run(10)
    assert ends == [("a", 1.0), ("b", 2.0), ("c", 2.0), ("d", 3.0)]


def test_commits_of_a_worker_begin_no_sooner_than_the_interval_of_groups() -> None:
    """A group has the k units that end in the interval, a Poisson number, or one that ends later: E[max(k, 1)]."""
    outcome = simulate(replace(ALONE, n_slots=200, waits_vary=True), FREE, seconds=50)
    assert outcome.per_commit == pytest.approx(200 * GROUP_S + exp(-200 * GROUP_S), rel=0.03)
    assert outcome.per_s == pytest.approx(200 / (1 + GROUP_S / 2), rel=0.03)


def test_a_unit_costs_more_where_many_are_leased() -> None:
    """The database reads how many units each run has; the cost is by transaction, so that X = 1 / (s * N)."""
    costs = replace(FREE, database_leased_ms=0.1)
    outcome = simulate(replace(ALONE, n_slots=1, n_workers=100), costs, seconds=30)
    assert outcome.per_s == pytest.approx(1 / (0.0001 * 100), rel=0.02)
