"""CPU time that an overlay adds to a call at the gateway.

    python benchmarks/overlay_transit.py [--calls 400] [--rounds 9]

Calls of the three dialects with 10,000 characters that an overlay replaces (8,000 of instructions, 2,000 of a tool's
description) and with lessons, and the same calls under a version without an overlay, in alternating rounds of one run.
The figure is this process's CPU time for a call, without network and store: from the bytes of the request to those for
the upstream, the answer, and the spans of the record. The difference is of each pair of rounds beside each other; the
median counts. Exits 1 above 0.2 CPU-ms more in any dialect.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from starlette.types import Message as AsgiMessage

from agentloop.gateway.app import Gateway
from agentloop.gateway.calls import Calls
from agentloop.gateway.routes import Routes, ServedVersion, Serving, Upstream
from agentloop.store.keys import Spent
from agentloop.types import Completion, Component, Lesson, Message, Overlay, Span, ToolSpec

MAX_CPU_MS = 0.2
N_SYSTEM, N_TOOL = 8000, 2000
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
PROSE = "Read the question twice, look the number up, and answer with care. "
OLD_SYSTEM = (PROSE * 200)[:N_SYSTEM]
OLD_TOOL = (PROSE[::-1] * 200)[:N_TOOL]
COMPONENTS = (
    Component(name="instructions", original=OLD_SYSTEM, text=OLD_SYSTEM.replace("twice", "thrice")),
    Component(name="tool.search", original=OLD_TOOL, text=OLD_TOOL.swapcase()),
)
LESSONS = tuple(Lesson(applies_to=f"orders of kind {n}", text=f"Look up order {n}.") for n in range(20))
OVERLAY = Overlay(components=COMPONENTS, lessons=LESSONS)


class Yes:
    """A model that says Yes."""

    name = "m"

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, max_tokens: int, seed: int
    ) -> Completion:
        """See `agentloop.protocols.Policy`."""
        return Completion(message=Message(role="assistant", content="Yes"), finish_reason="stop", n_prompt_tokens=9)


def body_of(dialect: str, n: int, version: int) -> bytes:
    """A request in the middle of a conversation."""
    talk: list[dict[str, Any]] = [{"role": "user", "content": f"Question {n} about order 7."}]
    for turn in range(6):
        talk += [{"role": "assistant", "content": f"Answer {turn}. {PROSE}"}, {"role": "user", "content": PROSE}]
    schema = {"type": "object", "properties": {"q": {"type": "string"}}}
    tool: dict[str, Any] = {"name": "search", "description": OLD_TOOL}
    body: dict[str, Any] = {"model": f"policy/{version}"}
    if dialect == "chat":
        body["messages"] = [{"role": "system", "content": OLD_SYSTEM}, *talk]
        body["tools"] = [{"type": "function", "function": {**tool, "parameters": schema}}]
    elif dialect == "messages":
        body |= {"max_tokens": 9, "system": [{"type": "text", "text": OLD_SYSTEM}], "messages": talk}
        body["tools"] = [{**tool, "input_schema": schema}]
    else:
        body |= {"instructions": OLD_SYSTEM, "input": talk}
        body["tools"] = [{"type": "function", **tool, "parameters": schema}]
    return orjson.dumps(body)


async def call(gateway: Gateway, path: str, episode: str, body: bytes) -> None:
    """One call over ASGI. Raises SystemExit for an answer that is an error."""
    sent: list[AsgiMessage] = []
    incoming: list[AsgiMessage] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> AsgiMessage:
        if incoming:
            return incoming.pop()
        await asyncio.sleep(3600)
        return {"type": "http.disconnect"}

    async def send(message: AsgiMessage) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": f"/e/{episode}{path}", "headers": [], "state": {}}
    await gateway(scope, receive, send)
    if sent[0]["status"] != 200:
        raise SystemExit(f"{path}: {sent[-1]['body']!r}")


async def measure(n_calls: int, n_rounds: int) -> dict[str, dict[str, float]]:
    """By dialect: median CPU-ms without and with an overlay, and of their differences."""
    spans: list[Span] = []

    async def put(project: str, new: Sequence[Span], n_bytes: int, spent: Mapping[str, Spent]) -> None:
        spans.extend(new)

    serving = Serving({1: ServedVersion(1, "m"), 2: ServedVersion(2, "m", overlay=OVERLAY)}, live=1)
    upstream = Upstream("model", "", via="policy", policy=Yes(), models=("m",))
    calls = Calls(Routes([upstream], None, lambda: serving), put)
    gateway = Gateway(_nothing, calls)
    figures: dict[str, dict[str, float]] = {}
    for dialect, path in PATHS.items():
        cpu: dict[int, list[float]] = {1: [], 2: []}
        for n_round in range(n_rounds + 1):
            for version in (1, 2) if n_round % 2 else (2, 1):
                bodies = [(f"{dialect}-{n_round}-{version}-{n}", body_of(dialect, n, version)) for n in range(n_calls)]
                gc.collect()
                started = time.process_time()
                for episode, body in bodies:
                    await call(gateway, path, episode, body)
                if n_round:  # the first round warms caches
                    cpu[version].append(1e3 * (time.process_time() - started) / n_calls)
                spans.clear()
        added = [after - before for before, after in zip(cpu[1], cpu[2], strict=True)]
        figures[dialect] = {
            "without": statistics.median(cpu[1]),
            "with": statistics.median(cpu[2]),
            "added": statistics.median(added),
        }
    await calls.close()
    return figures


async def _nothing(scope: Any, receive: Any, send: Any) -> None:
    """No other routes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    figures = asyncio.run(measure(options.calls, options.rounds))
    print(f"{'CPU-ms a call':16}{'without':>10}{'with':>10}{'added':>10}{'bound':>10}")
    for dialect, row in figures.items():
        print(f"{dialect:16}{row['without']:>10.3f}{row['with']:>10.3f}{row['added']:>10.3f}{MAX_CPU_MS:>10.1f}")
    missed = [dialect for dialect, row in figures.items() if row["added"] > MAX_CPU_MS]
    rounded = {dialect: {name: round(value, 3) for name, value in row.items()} for dialect, row in figures.items()}
    settings = {"calls": options.calls, "rounds": options.rounds, "replaced_characters": N_SYSTEM + N_TOOL}
    print(json.dumps({**rounded, **settings, "load": round(os.getloadavg()[0], 2), "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
