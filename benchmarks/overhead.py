"""What the framework costs an episode, apart from the model and the tools.

    python benchmarks/overhead.py

Rolls out, judges and stores episodes of a scripted policy on the demo suite, and beside it runs
the same commands with nothing around them (`subprocess.run`) in the same process, in alternating
rounds. The overhead is this process's own CPU time per episode; commands run in the box, whose CPU
time is another process's. Exits 1 above 5 CPU-ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from agentloop.demo.project import prepare_demo
from agentloop.loop.project import Silent, open_project
from agentloop.policies.scripted import oracle
from agentloop.sandbox.ladder import choose_backend
from agentloop.types import Purpose, Split

MAX_CPU_MS = 5.0


def bare(commands: list[str], folder: Path) -> float:
    """CPU-ms of this process per command that is run with nothing around it."""
    started = time.process_time()
    for command in commands:
        subprocess.run(["sh", "-c", command], cwd=folder, capture_output=True, check=True)
    return 1e3 * (time.process_time() - started) / len(commands)


async def rounds(project, n_rounds: int, n_episodes: int) -> tuple[list[float], list[float]]:
    """(CPU-ms an episode, CPU-ms a bare command) of each round."""
    tasks = (project.suite.split(Split.train) * 8)[:n_episodes]
    policy, ours, theirs = oracle(project.suite.tasks), [], []
    commands = [task.solution[0] for task in tasks]
    for n in range(n_rounds + 1):
        stage = project.begin(f"overhead-{n}")
        started = time.process_time()
        judged = await project.gather(stage, tasks, policy, purpose=Purpose.run, version=0, part=n)
        spent = 1e3 * (time.process_time() - started) / len(tasks)
        assert all(verdict.reward == 1.0 for *_, verdict in judged), "an episode failed; its cost means nothing"
        single = bare(commands, tasks[0].sandbox.files)
        if n:  # the first round warms caches and makes the box
            ours.append(spent)
            theirs.append(single)
    await project.pool.close()
    return ours, theirs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--sandbox", default="auto")
    options = parser.parse_args()
    backend = choose_backend(options.sandbox)
    with tempfile.TemporaryDirectory() as folder:
        prepare_demo(Path(folder) / "demo", 0)
        with open_project(Path(folder) / "demo", backend, Silent()) as project:
            ours, theirs = asyncio.run(rounds(project, options.rounds, options.episodes))
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = {
        "overhead_cpu_ms_per_episode": round(statistics.median(ours), 3),
        "overhead_min": round(min(ours), 3),
        "overhead_max": round(max(ours), 3),
        "bare_subprocess_cpu_ms_per_command": round(statistics.median(theirs), 3),
        "children_cpu_s": round(children.ru_utime + children.ru_stime, 2),
        "sandbox": backend.name,
        "episodes": options.rounds * options.episodes,
        "load": round(os.getloadavg()[0], 2),
        "bound": MAX_CPU_MS,
    }
    print(f"{'':34}{'median':>8}{'min':>8}{'max':>8}   CPU-ms of this process")
    print(f"{'agentloop, one episode':34}{statistics.median(ours):>8.2f}{min(ours):>8.2f}{max(ours):>8.2f}")
    print(
        f"{'bare subprocess.run, one command':34}{statistics.median(theirs):>8.2f}{min(theirs):>8.2f}{max(theirs):>8.2f}"
    )
    print(json.dumps(figures))
    return 0 if figures["overhead_cpu_ms_per_episode"] <= MAX_CPU_MS else 1


if __name__ == "__main__":
    sys.exit(main())
