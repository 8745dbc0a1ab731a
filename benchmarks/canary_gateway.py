"""A canary at the gateway while its share changes and a rollback ends it.

    python benchmarks/canary_gateway.py [--episodes 10000]

`agentloop serve` in a process of its own, before two upstream processes, one for each version. Episodes of three calls
run all the time; meanwhile the registry gives the canary 10% of new episodes, then 50%, ends it, begins it again with
30%, and restarts the gateway in between. An episode that is under way keeps its version. The figures come from the
upstreams, which note the episode and the version of each call that reaches them:

- episodes that two versions answered: none may be;
- the canary's share of the episodes that began in each phase, against its 99.9% binomial interval;
- the time from a move to the first new episode that heeds it, and to the last one that does not: within 2 s.

Exits 1 where a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web

from agentloop.identity import Identity
from agentloop.registry.moves import Moves
from agentloop.registry.versions import Registry
from agentloop.store.store import Store
from agentloop.types import VersionKind

N_CALLS = 3
N_AT_ONCE = 24
PAUSE_S = 0.5
"""Between the calls of episodes that are under way when a version moves."""
MAX_DELAY_S = 2.0
Z = 3.29
"""Of a two-sided 99.9% interval."""
LIVE, CANARY = 1, 2
SETTINGS = """
[project]
name = "shop"

[gateway]
{upstreams}
"""
UPSTREAM = """
[[gateway.upstream]]
name = "v{number}"
base_url = "http://127.0.0.1:{port}/v1"
models = ["policy-v{number}"]
"""


# ----------------------------------------------------------------------------------------------- the upstreams


def upstream(port: int) -> None:
    """A model server in a process of its own: it answers with the model that was asked."""

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        message = {"role": "assistant", "content": body["model"]}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
        made = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": body["model"]}
        return web.json_response({**made, "choices": [choice], "usage": usage})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": []})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_get("/v1/models", models)
    web.run_app(app, host="127.0.0.1", port=port, access_log=None, print=None)


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def process(port: int, *command: str, folder: Path = Path()) -> Iterator[None]:
    """A server, until the end of the block. folder: where it runs."""
    silent = subprocess.DEVNULL
    with subprocess.Popen([sys.executable, *command], stderr=silent, stdout=silent, cwd=folder) as running:
        try:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    time.sleep(0.05)
            else:
                raise SystemExit(f"nobody answers at port {port}")
            yield
        finally:
            running.terminate()


# ------------------------------------------------------------------------------------------------ the episodes


@dataclass
class Traffic:
    """Episodes and who answered them."""

    port: int
    versions: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By episode, of each of its calls in order."""
    began: dict[str, float] = field(default_factory=dict)
    n_failed: int = 0

    async def run(self, session: aiohttp.ClientSession, name: str, pause_s: float) -> None:
        """One episode of three calls; a call that fails is made again, as SDKs do."""
        self.began[name] = time.monotonic()
        talk = [{"role": "user", "content": f"Question of {name}"}]
        for _ in range(N_CALLS):
            text = await self._call(session, name, {"model": "policy/live", "messages": talk})
            self.versions[name].append(int(text.rpartition("v")[2]))
            talk += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
            await asyncio.sleep(pause_s)

    async def _call(self, session: aiohttp.ClientSession, name: str, body: dict[str, object]) -> str:
        url = f"http://127.0.0.1:{self.port}/e/{name}/v1/chat/completions"
        while True:
            try:
                async with session.post(url, json=body) as response:
                    if response.status == 200:
                        return str((await response.json())["choices"][0]["message"]["content"])
            except aiohttp.ClientError:
                pass  # the gateway restarts
            self.n_failed += 1
            await asyncio.sleep(0.1)


@asynccontextmanager
async def episodes(
    traffic: Traffic, phase: str, n: int, session: aiohttp.ClientSession, pause_s: float = 0.0
) -> AsyncIterator[None]:
    """`n` episodes, which go on while the block runs, and are over behind it. pause_s: between the calls of each."""
    slots = asyncio.Semaphore(N_AT_ONCE)

    async def one(i: int) -> None:
        async with slots:
            await traffic.run(session, f"{phase}-{i}", pause_s)

    tasks = [asyncio.ensure_future(one(i)) for i in range(n)]
    try:
        yield
    finally:
        await asyncio.gather(*tasks)


# --------------------------------------------------------------------------------------------------- the phases


@dataclass(frozen=True)
class Phase:
    """A share of the canary, and the move that brings it about."""

    name: str
    share: float
    move: Callable[[Moves], object]
    restarts: bool = False


PHASES = (
    Phase("canary-10", 0.1, lambda moves: moves.start_canary(CANARY, 0.1)),
    Phase("share-50", 0.5, lambda moves: moves.change_share(0.5)),
    Phase("restart-50", 0.5, lambda moves: None, restarts=True),
    Phase("ended", 0.0, lambda moves: moves.end_canary()),
    Phase("again-30", 0.3, lambda moves: moves.start_canary(CANARY, 0.3)),
    Phase("promoted", 1.0, lambda moves: moves.promote(CANARY, override="the benchmark")),
    Phase("rolled-back", 0.0, lambda moves: moves.roll_back(why="the benchmark")),
)


def register(store: Store) -> Moves:
    """Two versions of weights, the first live."""
    registry = Registry(store)
    for number in (LIVE, CANARY):
        registry.add(
            number=number, parent=number - 1 or None, kind=VersionKind.weights, artifact=None,
            identity=Identity(f"{number:064d}", {}), config_hash="c", note="",
        )  # fmt: skip
    return Moves(registry, "benchmark")


async def measure(folder: Path, ports: tuple[int, int, int], n_episodes: int) -> dict[str, object]:
    """All figures. ports: of the gateway and of the two upstreams."""
    store = Store(folder / "store.db")
    moves = register(store)
    traffic = Traffic(ports[0])
    serve = ("-m", "agentloop_cli", "serve", "--store", str(folder / "store.db"), "--port", str(ports[0]))
    moved: dict[str, float] = {}
    n = n_episodes // len(PHASES)
    timeout = aiohttp.ClientTimeout(60)
    running = process(ports[0], *serve, folder=folder)
    running.__enter__()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            for phase in PHASES:
                # Episodes of the last phase are under way while the version of new ones changes.
                async with episodes(traffic, f"before-{phase.name}", N_AT_ONCE, session, PAUSE_S):
                    await asyncio.sleep(0.1)
                    if phase.restarts:
                        await asyncio.to_thread(running.__exit__, None, None, None)
                        running = process(ports[0], *serve, folder=folder)
                        await asyncio.to_thread(running.__enter__)
                    await asyncio.to_thread(phase.move, moves)
                    moved[phase.name] = time.monotonic()
                    await _probe(traffic, phase.name, session)
                async with episodes(traffic, phase.name, n, session):
                    pass
    finally:
        running.__exit__(None, None, None)
        store.close()
    return report(traffic, moved)


async def _probe(traffic: Traffic, phase: str, session: aiohttp.ClientSession) -> None:
    """New episodes while a move comes into effect; what they get shows when it did."""
    ends = time.monotonic() + MAX_DELAY_S
    n = 0
    while time.monotonic() < ends:
        await traffic.run(session, f"probe-{phase}-{n}", 0.0)
        n += 1


# --------------------------------------------------------------------------------------------------- the figures


def report(traffic: Traffic, moved: dict[str, float]) -> dict[str, object]:
    """Prints the table; the figures, with what was missed."""
    mixed = sum(len(set(versions)) > 1 for versions in traffic.versions.values())
    short = sum(len(versions) != N_CALLS for versions in traffic.versions.values())
    missed = [name for name, number in (("mixed", mixed), ("short", short)) if number]
    print(f"{'phase':14}{'episodes':>10}{'share':>8}{'drawn':>9}{'99.9% interval':>20}{'delay s':>9}")
    delays: dict[str, float] = {}
    for phase in PHASES:
        drawn = Counter(v[0] for name, v in traffic.versions.items() if name.startswith(f"{phase.name}-"))
        n = drawn.total()
        half = Z * math.sqrt(phase.share * (1 - phase.share) / n)
        low, high = phase.share - half, phase.share + half
        if not low <= drawn[CANARY] / n <= high:
            missed.append(f"share of {phase.name}")
        delay = _delay(traffic, phase, moved[phase.name])
        delays[phase.name] = delay
        if delay > MAX_DELAY_S:
            missed.append(f"delay of {phase.name}")
        interval = f"{low:.3f} to {high:.3f}"
        print(f"{phase.name:14}{n:>10}{phase.share:>8.2f}{drawn[CANARY] / n:>9.3f}{interval:>20}{delay:>9.2f}")
    print(f"{len(traffic.versions)} episodes, {mixed} with two versions; {traffic.n_failed} calls were repeated")
    return {
        "episodes": len(traffic.versions),
        "calls": sum(map(len, traffic.versions.values())),
        "with_two_versions": mixed,
        "incomplete": short,
        "slowest_move_s": round(max(delays.values()), 3),
        "repeated_calls": traffic.n_failed,
        "missed": missed,
    }


def _delay(traffic: Traffic, phase: Phase, at: float) -> float:
    """Seconds from the move to the beginning of the last probe that shows the share before; 0 where none can.

    Only a share of 0 or 1 shows in a single episode which share it was drawn under.
    """
    if phase.share not in (0.0, 1.0):
        return 0.0
    wrong = LIVE if phase.share else CANARY
    late = [
        traffic.began[name] - at
        for name, versions in traffic.versions.items()
        if name.startswith((f"probe-{phase.name}-", f"{phase.name}-")) and versions[0] == wrong
    ]
    return max(late, default=0.0)


def run(n_episodes: int) -> dict[str, object]:
    """The benchmark, in processes and a folder of its own."""
    ports = free_port(), free_port(), free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        upstreams = "".join(UPSTREAM.format(number=n, port=ports[n]) for n in (LIVE, CANARY))
        (folder / "agentloop.toml").write_text(SETTINGS.format(upstreams=upstreams))
        program = str(Path(__file__).resolve())
        with ExitStack() as stack:
            for port in ports[1:]:
                stack.enter_context(process(port, program, "--upstream", str(port)))
            return asyncio.run(measure(folder, ports, n_episodes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--upstream", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.upstream:
        upstream(options.upstream)
        return 0
    load = os.getloadavg()[0]
    figures = run(options.episodes)
    print(json.dumps({**figures, "load_before": round(load, 2), "load_after": round(os.getloadavg()[0], 2)}))
    return 1 if figures["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
