"""How fast stored traces are judged again, and whether that can be interrupted.

    python benchmarks/rejudge.py [--traces 10000]

Stores made-up episodes of our own agent (2 to 10 steps, half of them wrong), then judges them again:
under a task that expects another answer, so that every score changes; once more, when nothing has
changed; and in a process that is interrupted and run again. Prints a table and one JSON line. Exits 1
below 500 traces/s, or when the history is not whole.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from agentloop.judge.rejudge import JudgingSummary, rejudge
from agentloop.judge.score import judge
from agentloop.store.store import Store
from agentloop.types import (
    Attempt,
    Completion,
    Episode,
    EpisodeState,
    Message,
    Part,
    Purpose,
    Step,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    Trace,
)

MIN_RATE = 500.0
N_TASKS = 50


def task(n: int, expected: str) -> Task:
    """The task of that number."""
    return Task(
        id=f"count-{n}",
        instruction=f"How many lines has file{n}?",
        solution=(f"wc -l < file{n}",),
        verifiers=(
            Part(kind="exact", options={"expected": expected}),
            Part(kind="regex", options={"pattern": "[0-9]+"}),
        ),
    )


def trace(n: int, rng: random.Random) -> Trace:
    """An episode's record: some commands over a file, and an answer."""
    steps = []
    for index in range(rng.randrange(2, 11)):
        command = rng.choice(
            [f"wc -l < file{n % N_TASKS}", "ls -l", f"head -n {index} file{n % N_TASKS}", "cat nowhere"]
        )
        ok = command != "cat nowhere"
        call = ToolCall(id=f"call_{index}", name="shell", arguments=json.dumps({"command": command}))
        printed = (
            "\n".join(f"{rng.random():.6f} some line of a file" for _ in range(8)) if ok else "exit code 1\ncat: no"
        )
        steps.append(
            Step(
                index=index,
                completion=Completion(
                    message=Message(role="assistant", tool_calls=(call,), token_ids=tuple(range(40))),
                    finish_reason="stop",
                    prompt_token_ids=tuple(range(100)),
                    logprobs=tuple(-rng.random() for _ in range(40)),
                ),
                results=(ToolResult(call_id=call.id, name="shell", content=printed, ok=ok, exit_code=0 if ok else 1),),
            )
        )
    return Trace(
        id=f"{n:032x}",
        episode_id=f"e{n}",
        task_id=f"count-{n % N_TASKS}",
        policy_version=1,
        messages=(Message(role="user", content=f"How many lines has file{n % N_TASKS}?"),),
        steps=tuple(steps),
        answer=rng.choice(["7", "8"]),
        stop_reason=StopReason.submitted,
        started_at=datetime.now(UTC),
    )


def fill(store: Store, n_traces: int) -> None:
    """Judged and stored under tasks that expect 7."""
    rng = random.Random(0)
    for first in range(0, n_traces, 500):
        judged: list[Attempt] = []
        for n in range(first, min(first + 500, n_traces)):
            made, of = trace(n, rng), task(n % N_TASKS, "7")
            episode = Episode(
                id=f"e{n}", task_id=of.id, group=of.id, purpose=Purpose.run, policy_version=1, seed=n,
                state=EpisodeState.finished,
            )  # fmt: skip
            verdict = asyncio.run(judge(of, made))
            judged.append(Attempt(task=of, episode=episode, trace=made, verdict=verdict))
        store.put_attempts("bench", judged, first=first)


def again(path: Path, expected: str) -> tuple[JudgingSummary, float]:
    """(what was done, seconds)."""
    store = Store(path)
    started = time.perf_counter()
    account = asyncio.run(rejudge(store, {f"count-{n}": task(n, expected) for n in range(N_TASKS)}))
    seconds = time.perf_counter() - started
    store.close()
    return account, seconds


def interrupted(path: Path, expected: str, after_s: float) -> bool:
    """Whether a process that judges again was ended by Ctrl-C after a while."""
    child = subprocess.Popen([sys.executable, __file__, "--child", str(path), expected], stderr=subprocess.DEVNULL)
    time.sleep(after_s)
    child.send_signal(signal.SIGINT)
    return child.wait() != 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=10_000)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        again(Path(given.child[0]), given.child[1])
        return 0
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        store = Store(path)
        fill(store, given.traces)
        store.close()
        account, seconds = again(path, "8")
        same, same_s = again(path, "8")
        was_interrupted = interrupted(path, "7", seconds / 2)
        rest, _ = again(path, "7")
        store = Store(path)
        histories = [len(store.history("default", f"{n:032x}")) for n in range(0, given.traces, 37)]
        n_changed = sum(account.changed.values())
        store.close()
    figures = {
        "traces": given.traces,
        "per_s": given.traces / seconds,
        "unchanged_per_s": given.traces / same_s,
        "changed": n_changed,
        "done_before_the_interrupt": rest.n_same if was_interrupted else None,
    }
    whole = account.n_rescored == given.traces == same.n_same and set(histories) == {3} and rest.n == given.traces
    for name, value in figures.items():
        print(f"{name:28}{'-':>12}" if value is None else f"{name:28}{value:>12,.0f}")
    print(json.dumps({**figures, "history_is_whole": whole, "load": [load_before, os.getloadavg()[0]]}))
    return 0 if whole and figures["per_s"] >= MIN_RATE else 1


if __name__ == "__main__":
    sys.exit(main())
