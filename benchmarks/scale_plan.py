"""From measured service times to plans: the check that comes first, larger fleets, what is busiest, and the price."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from scale_model import Costs, Fleet, Outcome, simulate

WITHIN = 0.15
"""Largest difference between simulation and measurement that allows an extrapolation."""
EPISODES_AT_ONCE = (1000, 10_000, 100_000)


def conclude(report: dict[str, Any], options: argparse.Namespace) -> int:
    """Add to the measurements whether the simulation reproduces them, and if so, what it extrapolates.

    Returns the exit code.
    """
    checks = [value["differs_by"] for name, value in report.items() if name.endswith("_workers")]
    report["reproduces"] = max(checks) <= WITHIN
    if not report["reproduces"]:
        return 1
    report["extrapolated"] = []
    for one in extrapolated(planned_costs(report, options), report["connections_per_worker"], options):
        report["extrapolated"].append(one)
        print(one, flush=True)
    return 0


def differs_by(simulated: float, measured: float) -> float:
    """Share of the measured figure."""
    return abs(simulated - measured) / measured


def planned_costs(report: dict[str, Any], options: argparse.Namespace) -> Costs:
    """Of episodes that leave a trace, on machines that do nothing else."""
    measured = Costs(**report["trace"])
    return replace(
        measured,
        loop_ms=measured.loop_ms + options.agent_cpu_ms,
        database_leased_ms=report["leased_ms"],
        pause_commit_ms=0.0,  # `--round-trips-ms` takes their place
        pause_unit_ms=0.0,
    )


def busiest(outcome: Outcome, n_connections: float, options: argparse.Namespace) -> list[tuple[str, float]]:
    """Parts with the share of their capacity that is in use, the busiest first.

    The log is none of them: a flush covers all transactions that wait, so a log that is always busy refuses nothing.
    """
    parts = {
        "a worker's process": outcome.worker_busy,
        "cores of the workers": outcome.worker_cores_busy,
        "cores of the database": outcome.database_busy,
        "connections to the database": n_connections / options.connections,
    }
    return sorted(parts.items(), key=lambda part: -part[1])


def extrapolated(costs: Costs, per_worker: float, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """With one run, and with several. per_worker: connections."""
    for n_at_once, has_several in product(EPISODES_AT_ONCE, (False, True)):
        n_workers = -(-n_at_once // options.worker_slots)
        planned = Fleet(
            n_workers, min(options.worker_slots, n_at_once), options.episode_s, waits_vary=True,
            worker_cores=options.worker_cores, database_cores=options.database_cores,
            round_trips_ms=options.round_trips_ms,
        )  # fmt: skip
        alone = replace(costs, database_leased_ms=0.0)
        outcome = simulate(planned, costs if has_several else alone, seconds=30.0)
        parts = busiest(outcome, n_workers * per_worker, options)
        prices = usd_per_million(outcome.per_s, n_workers, options)
        yield {
            "at_once": n_at_once, "several_runs": has_several, "workers": n_workers,
            "per_s": round(outcome.per_s, 1),
            "wanted_per_s": round(n_at_once / options.episode_s, 1),
            "saturates_first": parts[0][0], "busy": {name: round(share, 3) for name, share in parts},
            "log_busy": round(outcome.flush_busy, 3),
            "usd_per_million": {name: round(usd, 2) for name, usd in prices},
        }  # fmt: skip


def usd_per_million(per_s: float, n_workers: int, options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """By the cores of workers and database, by the CPU of the gateway, and by the episodes that a GPU serves."""
    hours = 1e6 / per_s / 3600
    gateway_hours = 1e6 * options.calls_per_episode * options.gateway_call_ms / 1000 / 3600
    yield "workers", hours * n_workers * options.worker_cores * options.core_hour_usd
    yield "database", hours * options.database_cores * options.core_hour_usd
    yield "gateway", gateway_hours * options.core_hour_usd
    yield "model", 1e6 / options.episodes_per_gpu_hour * options.gpu_hour_usd


def parsed(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    for name, default, words in (
        ("--episode-s", 60.0, "mean duration of an episode"),
        ("--worker-slots", 256, "units that a worker does at once"),
        ("--worker-cores", 4.0, "cores of a worker's machine"),
        ("--database-cores", 8.0, "cores of the database's machine"),
        ("--round-trips-ms", 3.0, "network time of a transaction"),
        ("--connections", 500, "connections that the database allows"),
        ("--agent-cpu-ms", 5.0, "CPU of a worker for an episode, beside its commit"),
        ("--calls-per-episode", 10.0, "model calls through the gateway"),
        ("--gateway-call-ms", 3.4, "CPU of the gateway for a call"),
        ("--core-hour-usd", 0.04, "price of a core"),
        ("--gpu-hour-usd", 3.0, "price of a GPU"),
        ("--episodes-per-gpu-hour", 20_000.0, "episodes that a GPU serves in an hour"),
    ):
        parser.add_argument(name, type=type(default), default=default, help=f"{words} (default: {default:g})")
    return parser.parse_args()
