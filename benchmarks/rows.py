"""How fast rows stream: decoded from the store, from the store through a memory-mapped segment, and from that alone.

    python benchmarks/rows.py [--traces 2000] [--tokens 1000]

Attempts of four turns are written into an empty SQLite store as a loop writes them: each step has the ids of its whole
prompt and the log-probabilities of its answer. Then all rows are read three times each way, by turns; the median
counts. CPU is that of this process. `stored_rows` reads every verdict from the store, and the rows from the segment.
Segments are read with their checksums, and every array is summed, so that each byte is really read. The last line is
JSON; exits 1 where `stored_rows` streams fewer than a million tokens a second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from agentloop.otel.stored_trace import StoredTrace
from agentloop.store.store import Store
from agentloop.train.data.admission import Admission
from agentloop.train.data.chains import Cut, rows_of
from agentloop.train.data.segments import RowSegment
from agentloop.train.data.stored_rows import stored_rows
from agentloop.types import (
    Attempt,
    Completion,
    Episode,
    EpisodeState,
    Judged,
    Message,
    Purpose,
    RewardState,
    Sampling,
    Step,
    StopReason,
    Task,
    Trace,
    Verdict,
)

BOUND = 1_000_000
"""Tokens a second."""
N_TURNS, N_ROUNDS, N_PUT = 4, 3, 200
ADMISSION = Admission()


def attempt(n: int, n_tokens: int) -> Attempt:
    """An attempt whose last prompt and answer have `n_tokens` ids; half of them are sampled."""
    rng = random.Random(n)
    part = n_tokens // (2 * N_TURNS)
    ids: list[int] = []
    steps = []
    for index in range(N_TURNS):
        ids += [rng.randrange(150_000) for _ in range(part)]
        sampled = tuple(rng.randrange(150_000) for _ in range(part))
        done = Completion(
            message=Message(role="assistant", content="x" * 4 * part, token_ids=sampled), finish_reason="stop",
            prompt_token_ids=tuple(ids), logprobs=tuple(-rng.random() for _ in sampled), sampling=Sampling(),
        )  # fmt: skip
        steps.append(Step(index=index, completion=done))
        ids += sampled
    task = Task(id=f"t{n % 50}", instruction="Do it.", pool="bench")
    episode = Episode(
        id=f"e{n}", task_id=task.id, group=f"g{n // 8}", purpose=Purpose.train, policy_version=1, seed=n,
        state=EpisodeState.finished,
    )  # fmt: skip
    trace = Trace(
        id=f"{n:032x}", episode_id=episode.id, task_id=task.id, policy_version=1, isolation="namespaces",
        messages=(Message(role="user", content="Do it."),), steps=tuple(steps), stop_reason=StopReason.submitted,
    )  # fmt: skip
    verdict = Verdict(trace_id=trace.id, state=RewardState.scored, reward=float(n % 2))
    return Attempt(task=task, episode=episode, trace=trace, verdict=verdict)


def decoded(store: Store) -> Iterator[Cut]:
    """Every trace, decoded and cut."""
    for row in store.every():
        stored = StoredTrace(store, row)
        yield rows_of(Judged(stored.trace, stored.verdict, None, row.group, row.pool or ""), ADMISSION)


def tokens_per_s(read: Callable[[], Iterator[Cut]]) -> tuple[float, float]:
    """(tokens a second by the clock, tokens a CPU-second); every array is read."""
    wall = time.perf_counter()
    cpu = time.process_time()
    n = 0
    for cut in read():
        for row in cut.rows:
            assert row.logprobs is not None
            n += len(row)
            row.token_ids.sum(), row.action_mask.sum(), row.logprobs.sum()
    return n / (time.perf_counter() - wall), n / (time.process_time() - cpu)


def measure(folder: Path, n_traces: int, n_tokens: int) -> dict[str, float]:
    store = Store(folder / "store.db")
    for start in range(0, n_traces, N_PUT):
        attempts = [attempt(n, n_tokens) for n in range(start, min(start + N_PUT, n_traces))]
        store.put_attempts("bench", attempts, first=start)
    segment = RowSegment(folder / "rows", ADMISSION)
    started = time.perf_counter()
    n_cut = sum(1 for _ in stored_rows(store, segment))
    fill_s = time.perf_counter() - started
    assert n_cut == n_traces
    ways: dict[str, Callable[[], Iterator[Cut]]] = {
        "store": lambda: decoded(store),
        "stored_rows": lambda: stored_rows(store, segment),
        "segment": lambda: (cut for _, cut in segment.every()),
    }
    rounds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(N_ROUNDS):
        for way, read in ways.items():
            rounds[way].append(tokens_per_s(read))
    figures = {"traces": float(n_traces), "fill_s": fill_s}
    for way, values in rounds.items():
        figures[f"{way}_tokens_per_s"] = statistics.median(wall for wall, _ in values)
        figures[f"{way}_tokens_per_cpu_s"] = statistics.median(cpu for _, cpu in values)
    figures["segment_mb"] = segment.path.stat().st_size / 1e6
    store.close()
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=1000, help="ids of a trace's last prompt and answer")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), options.traces, options.tokens)
    figures["load"] = os.getloadavg()[0]
    for name, value in figures.items():
        print(f"{name:28} {value:>16,.2f}")
    print(json.dumps(figures))
    return int(figures["stored_rows_tokens_per_s"] < BOUND)


if __name__ == "__main__":
    sys.exit(main())
