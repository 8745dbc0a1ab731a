"""What a page of a long trace costs beside reading all of it.

    python benchmarks/steps.py [--steps 10000]

Stores one imported trace whose steps all differ, and reads in alternating rounds the whole trace, a page of 50 steps
from its end, and its head as JSON, which is the floor: every page inflates it. Exits 1 unless a page costs at most 1.2
times the floor and less than half of the whole.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import orjson

from agentloop.store.bodies import decompress
from agentloop.store.store import Store
from agentloop.types import Completion, Imported, Message, Step, ToolCall, ToolResult, Trace

ID = f"{7:032x}"
MAX_OF_FLOOR = 1.2
MAX_SHARE = 0.5


def long_trace(n_steps: int) -> Trace:
    """Steps with a call and a result of about 2 KB, none like another."""
    steps = []
    for n in range(n_steps):
        call = ToolCall(id=f"c{n}", name="shell", arguments=json.dumps({"command": f"sed -n {n}p notes.txt"}))
        message = Message(role="assistant", content=f"I read line {n}.", tool_calls=(call,))
        text = f"line {n}: " + " ".join(f"word-{n}-{k}" for k in range(130))
        result = ToolResult(call_id=f"c{n}", name="shell", content=text, ok=True)
        steps.append(Step(index=n, completion=Completion(message=message, finish_reason="stop"), results=(result,)))
    return Trace(id=ID, source="benchmark", messages=(Message(role="user", content="Go."),), steps=tuple(steps))


def measured(reads: dict[str, Callable[[], object]], n_rounds: int) -> dict[str, float]:
    """Median CPU-ms of each way to read."""
    spent: dict[str, list[float]] = {name: [] for name in reads}
    for _ in range(n_rounds):
        for name, read in reads.items():
            started = time.process_time()
            read()
            spent[name].append(1e3 * (time.process_time() - started))
    return {name: statistics.median(times) for name, times in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store.db")
        trace = long_trace(options.steps)
        store.put_imported("default", [Imported(trace=trace)])
        row = store.row("default", ID)
        start = options.steps - 50
        assert store.steps(row, start=start).steps == trace.steps[start:], "the page is not what the trace has there"
        reads: dict[str, Callable[[], object]] = {
            "whole": lambda: store.imported("default", ID),
            "page": lambda: store.steps(store.row("default", ID), start=start),
            "head": lambda: orjson.loads(decompress(store.row("default", ID).body or b"")),
        }
        figures = measured(reads, options.rounds)
        store.close()
    share = figures["page"] / figures["whole"]
    of_floor = figures["page"] / figures["head"]
    for name, ms in figures.items():
        print(f"{name:6} {ms:9.1f} CPU-ms")
    load = os.getloadavg()[0]
    print(f"a page: {of_floor:.2f} of the floor (at most {MAX_OF_FLOOR}), {share:.0%} of the whole; load {load:.1f}")
    print(json.dumps({"steps": options.steps, **figures, "of_floor": of_floor, "share": share, "load": load}))
    raise SystemExit(of_floor > MAX_OF_FLOOR or share > MAX_SHARE)


if __name__ == "__main__":
    main()
