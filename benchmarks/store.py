"""What a commit of one attempt costs, and how far writers disturb each other.

    python benchmarks/store.py [--only sqlite|postgresql] [--quick]

Writes attempts of three steps into an empty store, alone and in groups of 16, and reads each back. On a PostgreSQL
server of its own it lets one and then four processes write at once, each attempt alone; then one process puts spans,
with nobody beside it, beside two such writers, and beside two that write PACE attempts a second each. CPU is that of
the process that writes, PostgreSQL's own is not in it. Where the cores are busy with other work, processes that write
as fast as they can lose to each other what they lose of the cores; beside paced writers the cores are free, so what is
lost there is lost to locks. Rounds take turns and their median counts, because other work on the machine moves all of
them. The last line is JSON; exits 1 when a bound is missed or an attempt is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import orjson

from agentloop.store.store import Store
from agentloop.testing import postgresql
from agentloop.types import (
    Attempt,
    Completion,
    Episode,
    EpisodeState,
    Message,
    Purpose,
    RewardState,
    Score,
    Span,
    Split,
    Step,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    Trace,
    Verdict,
)

N_STEPS, GROUP, PER_BATCH, PER_TRACE, N_WRITERS = 3, 16, 100, 10, 4
PACE = 10.0
"""Attempts a second of a paced writer."""
WORDS = Path(__file__).read_text().split()
BOUNDS = {
    "sqlite_alone_cpu_ms": ("at most", 3.0),
    "sqlite_grouped_cpu_ms": ("at most", 0.7),
    "postgresql_alone_cpu_ms": ("at most", 3.0),
    "postgresql_grouped_cpu_ms": ("at most", 0.7),
    "four_writers_share": ("at least", 1.5),
    "spans_beside_two_share": ("at least", 0.7),
    "spans_beside_paced_share": ("at least", 0.7),
    "missing": ("at most", 0.0),
}
"""Of what is printed; the rest is for comparison."""


class Figure(NamedTuple):
    """One line of the table: the rounds of one measurement."""

    name: str
    unit: str
    rounds: list[float]


class Written(NamedTuple):
    """What one process did."""

    per_s: float
    """Commits."""
    cpu_share: float
    """Of one core."""


def attempt(name: str, n: int) -> Attempt:
    """An attempt of three steps, each with a call and a result of its own, about 400 characters long."""
    task = Task(id=f"task-{n % 50}", instruction=words(n % 50, 300), split=Split.train, pool="bench")
    episode = Episode(
        id=f"e-{name}-{n}", task_id=task.id, group=f"{name}/{n // 4}", purpose=Purpose.train, policy_version=1,
        seed=n, state=EpisodeState.finished,
    )  # fmt: skip
    steps = tuple(step(index, f"{name}-{n}") for index in range(N_STEPS))
    trace = Trace(
        id=f"{name}-{n}", episode_id=episode.id, task_id=task.id, policy_version=1, isolation="namespaces",
        messages=(Message(role="user", content=task.instruction),), steps=steps, answer=str(n),
        stop_reason=StopReason.submitted, started_at=datetime.now(UTC), duration_s=0.5,
    )  # fmt: skip
    scores = (Score(verifier="exact", version="1", value=1.0), Score(verifier="command", version="1", value=1.0))
    verdict = Verdict(trace_id=trace.id, state=RewardState.scored, reward=1.0, scores=scores)
    return Attempt(task=task, episode=episode, trace=trace, verdict=verdict)


def step(index: int, seed: str) -> Step:
    call = ToolCall(id=f"call_{index}", name="shell", arguments=json.dumps({"command": words(f"{seed}c{index}", 80)}))
    message = Message(role="assistant", content=words(f"{seed}m{index}", 200), tool_calls=(call,))
    result = ToolResult(call_id=call.id, name="shell", content=words(f"{seed}r{index}", 400), ok=True, exit_code=0)
    completion = Completion(message=message, finish_reason="tool_calls", n_prompt_tokens=500, n_completion_tokens=60)
    return Step(index=index, completion=completion, results=(result,), duration_s=0.1)


def words(seed: object, n: int) -> str:
    """About `n` characters that follow from `seed`."""
    at = hash(str(seed)) % len(WORDS)
    chosen = [WORDS[(at + i * 7) % len(WORDS)] for i in range(n // 7 + 1)]
    return f"{seed} {' '.join(chosen)}"[:n]


def spans(name: str, batch: int) -> list[Span]:
    """A batch of spans as ingest hands them over: models' calls with a prompt and an answer of their own."""
    made = []
    for i in range(PER_BATCH):
        number = batch * PER_BATCH + i
        head = orjson.dumps({"attributes": {"gen_ai.operation.name": "chat", "gen_ai.input.messages": [{"$": 0}]}})
        bodies = (orjson.dumps(words(f"{name}{number}", 800)), orjson.dumps(words(f"{name}{number}a", 200)))
        at = time.time_ns()
        trace_id = f"{hash((name, number // PER_TRACE)) % 2**63:032x}"
        made.append(Span(trace_id, f"{number:016x}", None, "chat", "chat", at, at + 10**6, None, None, None, "bench",
                         None, 100, 10, None, head, bodies))  # fmt: skip
    return made


def cpu_ms(where: str, size: int, n: int, rounds: int) -> Iterator[float]:
    """CPU-ms an attempt, `size` in a commit, one round at a time; attempts are made before the clock starts."""
    for number in range(rounds + 1):
        store = Store(where if "://" in where else Path(where))
        name = f"s{size}-{number}-{os.getpid()}"
        made = [attempt(name, i) for i in range(n)]
        before = time.process_time()
        for at in range(0, n, size):
            store.put_attempts(name, made[at : at + size], first=at)
        used = 1e3 * (time.process_time() - before) / n
        store.close()
        if number:  # the first round warms caches
            yield used


def count(where: str) -> int:
    """Attempts that are there whole."""
    store = Store(where if "://" in where else Path(where), create=False)
    whole = sum(len(store.trace(row.id)[1].steps) == N_STEPS for row in store.find_traces(limit=10**6))
    store.close()
    return whole


def work(kind: str, where: str, name: str, seconds: float) -> int:
    """What a process of its own does: it writes for `seconds` and prints how many a second it committed."""
    store = Store(where)
    print("ready", flush=True)
    sys.stdin.readline()
    n, started, started_cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - started < seconds:
        if kind == "paced":
            time.sleep(max(0.0, started + n / PACE - time.perf_counter()))
        if kind != "spans":
            store.put_attempts(name, [attempt(name, n)], first=n)
            n += 1
        else:
            store.put_spans("bench", spans(name, n // PER_BATCH))
            n += PER_BATCH
    cpu_share = (time.process_time() - started_cpu) / (time.perf_counter() - started)
    print(json.dumps([n / (time.perf_counter() - started), cpu_share]), flush=True)
    store.close()
    return 0


def together(where: str, kinds: list[str], seconds: float) -> list[Written]:
    """What processes that start together commit, each of its kind."""
    command = [sys.executable, __file__, "--where", where, "--seconds", str(seconds)]
    started = [
        subprocess.Popen(
            [*command, "--work", kind, "--name", f"{kind}{n}-{time.monotonic_ns()}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n, kind in enumerate(kinds)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return [Written(*json.loads(process.communicate(timeout=seconds * 10 + 60)[0])) for process in started]


def writers(where: str, rounds: int, seconds: float) -> list[Figure]:
    """Attempts of one and of four writers, and spans alone and beside two of them; in turn."""
    kinds = {
        "one": ["attempts"],
        "four": ["attempts"] * N_WRITERS,
        "alone": ["spans"],
        "beside": ["spans", "attempts", "attempts"],
        "paced": ["spans", "paced", "paced"],
    }
    done: dict[str, list[list[Written]]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, processes in kinds.items():
            done[name].append(together(where, processes, seconds))
    one, four = ([sum(each.per_s for each in round_) for round_ in done[name]] for name in ("one", "four"))
    alone, beside, paced = ([round_[0] for round_ in done[name]] for name in ("alone", "beside", "paced"))
    return [
        Figure("one writer", "attempts/s", one),
        Figure("four writers", "attempts/s", four),
        Figure("spans alone", "spans/s", [each.per_s for each in alone]),
        Figure("spans beside two writers", "spans/s", [each.per_s for each in beside]),
        Figure("spans beside two paced", "spans/s", [each.per_s for each in paced]),
        Figure("four writers share", "of one", [many / few for many, few in zip(four, one, strict=True)]),
        Figure("spans beside two share", "of alone", _shares(beside, alone)),
        Figure("spans beside paced share", "of alone", _shares(paced, alone)),
        Figure("CPU share of spans alone", "of a core", [each.cpu_share for each in alone]),
        Figure("CPU share of spans beside two", "of a core", [each.cpu_share for each in beside]),
    ]


def _shares(some: list[Written], whole: list[Written]) -> list[float]:
    return [part.per_s / all_.per_s for part, all_ in zip(some, whole, strict=True)]


def measure(database: str, where: str, *, quick: bool) -> tuple[list[Figure], int]:
    """The figures of one database, and how many attempts are missing from it."""
    n, rounds = (64, 2) if quick else (320, 5)
    figures = [
        Figure(f"{database} alone", "CPU-ms", list(cpu_ms(where, 1, n, rounds))),
        Figure(f"{database} grouped", "CPU-ms", list(cpu_ms(where, GROUP, n, rounds))),
    ]
    missing = 2 * (rounds + 1) * n - count(where)
    if database == "postgresql":
        figures += writers(where, 1 if quick else 3, 2.0 if quick else 5.0)
    return figures, missing


def report(figures: list[Figure], missing: int, loads: list[float]) -> int:
    """Print the table and the line; the exit code."""
    print(f"{'':32}{'median':>10}{'min':>10}{'max':>10}")
    values: dict[str, float] = {"missing": missing}
    for name, unit, rounds in figures:
        middle = statistics.median(rounds)
        print(f"{name + ', ' + unit:32}{middle:>10.2f}{min(rounds):>10.2f}{max(rounds):>10.2f}")
        key = name.replace(" ", "_") + ("_cpu_ms" if unit == "CPU-ms" else "")
        values[key] = round(middle, 3)
    missed = []
    for name, (sense, bound) in BOUNDS.items():
        if name in values and (values[name] > bound if sense == "at most" else values[name] < bound):
            missed.append(f"{name} is {values[name]}, bound {sense} {bound}")
    for line in missed:
        print(line)
    print(json.dumps({**values, "load_before": round(loads[0], 2), "load_after": round(loads[1], 2)}))
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["sqlite", "postgresql"])
    parser.add_argument("--quick", action="store_true")
    for name, kind in (("--work", str), ("--where", str), ("--name", str), ("--seconds", float)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.work, options.where, options.name, options.seconds)
    figures: list[Figure] = []
    missing, loads = 0, [os.getloadavg()[0]]
    with ExitStack() as stack:
        places = {"sqlite": f"{stack.enter_context(tempfile.TemporaryDirectory())}/store.db"}
        if options.only != "sqlite":
            server = stack.enter_context(postgresql.server())
            places["postgresql"] = stack.enter_context(postgresql.database(server))
        for database, where in places.items():
            if options.only in (None, database):
                more, lost = measure(database, where, quick=options.quick)
                figures += more
                missing += lost
    return report(figures, missing, [*loads, os.getloadavg()[0]])


if __name__ == "__main__":
    sys.exit(main())
