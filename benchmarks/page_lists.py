"""How long the list pages take over a store of a million spans.

    python benchmarks/page_lists.py [--only sqlite|postgresql] [--traces 100000] [--rounds 20] [--at STORE]

Fills a store with traces of ten spans, and requests the list of traces with filters of each kind, its fragments, and
the pages of failures, costs and the start, from a service in this process: the seconds are those of the server with the
store, without a network. `indexed` are filters with a key that has an index; `bounded` are all others, which look at the
newest traces only. The other pages are measured with an empty cache (`cold`) and again. The last line is JSON; exits 1
if a bound is missed. --at keeps the store (a file, or a URL of PostgreSQL) and fills it only if it is empty.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
from sqlalchemy import text

from agentloop.store.store import Store
from agentloop.types import Span

PER_TRACE = 10
BATCH = 200
"""Traces of a commit while the store is filled."""
N_TASKS, N_VERSIONS, N_RARE = 200, 10, 50
START_NS = 1_767_225_600 * 10**9
WORDS = Path(__file__).read_text().split()
TYPES = ("call.wrong_arguments", "obs.misread", "outcome.premature_stop", "plan.repetition", "infra.tool_timeout")


def spans(number: int) -> Iterator[Span]:
    """The spans of a trace: an agent with calls of a model and of tools in turn."""
    draw = random.Random(number)
    trace_id = f"{draw.getrandbits(128):032x}"
    at = START_NS + number * 10**9
    tools = ["shell", "shell", "search", "rare" if number % 2000 == 7 else "read"]
    for n in range(PER_TRACE):
        kind = "agent" if n == 0 else ("chat", "tool")[n % 2]
        is_chat = kind == "chat"
        bodies = () if n == 0 else (orjson.dumps(f"{number} {' '.join(draw.choices(WORDS, k=12))}"),)
        head = {"attributes": {"n": n}, "messages": [{"$": i} for i in range(len(bodies))]}
        yield Span(
            trace_id=trace_id, span_id=f"{n + 1:016x}", parent_id=f"{1:016x}" if n else None, name=f"{kind} {n}",
            kind=kind, start_ns=at, end_ns=at + draw.randrange(10**7, 10**10),
            error="connection refused" if n == 4 and number % 5 == 0 else None, session=f"s{number // 3}",
            agent="helper" if n == 0 else None, model=f"model-{number % 3}" if is_chat else None,
            tool=draw.choice(tools) if kind == "tool" else None,
            n_prompt_tokens=draw.randrange(100, 4000) if is_chat else 0,
            n_completion_tokens=draw.randrange(10, 400) if is_chat else 0,
            cost_usd=draw.random() / 100 if is_chat and number % 4 else None,
            head=orjson.dumps(head), bodies=bodies, task_id=f"task-{number % N_TASKS}",
            policy_version=1 + number * N_VERSIONS // 1_000_000 % N_VERSIONS if n == 0 else None,
            reward=float(number % 10 < 7) if n == 0 else None,
        )  # fmt: skip


def fill(store: Store, n_traces: int) -> None:
    """Store the traces, then the critical label of every trace with reward 0."""
    for first in range(0, n_traces, BATCH):
        batch = [span for number in range(first, min(first + BATCH, n_traces)) for span in spans(number)]
        store.put_spans(store.project, batch)
    kinds = " ".join(f"WHEN {n} THEN '{kind}'" for n, kind in enumerate(TYPES))
    kind = f"CASE key % {len(TYPES)} {kinds} END"
    versions = f"UPDATE trace SET policy_version = 1 + (key - 1) * {N_VERSIONS} / {n_traces}"
    labels = (
        "INSERT INTO label (trace_key, detector, type, step, evidence, confidence, critical, given_at) "
        f"SELECT key, 'rules@1', {kind}, 3, 'the answer ' || (key % 40) || ' is not in the file', 0.9, "
        "TRUE, stored_at FROM trace WHERE reward < 1"
    )
    with store.transaction() as connection:
        for statement in (versions, f"UPDATE trace SET failure = {kind} WHERE reward < 1", labels):
            connection.execute(text(statement))


if __name__ == "__main__":
    import sys

    s = Store(sys.argv[1])
    t = time.time()
    fill(s, int(sys.argv[2]))
    print(time.time() - t)
