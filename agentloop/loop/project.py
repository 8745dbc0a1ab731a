"""A project on disk, opened: its settings, tasks, memory and versions, and the way to gather experience.

agentloop.toml        what is set                    evals/      suites, and regressions/
sandboxes/            what boxes are made of         traces/     store.db: every trace
policies/v0001/       one folder a version           report.html what came of it
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from agentloop.agents.tool_loop import ToolLoop
from agentloop.config import Config, load_config
from agentloop.episode import Crew, Pool, plan, roll_out
from agentloop.errors import ConfigError
from agentloop.gate.suite import Suite, load_suite
from agentloop.judge.score import judge
from agentloop.policies.lockstep import BatchPolicy
from agentloop.protocols import Policy, SandboxBackend
from agentloop.registry.versions import Registry
from agentloop.sandbox.pool import SandboxPool
from agentloop.store.store import Judged, Store
from agentloop.store.tables import StageRow
from agentloop.types import Purpose, Split, Task

STORE = Path("traces") / "store.db"
POLICIES = Path("policies")
REPORT = Path("report.html")
REGRESSIONS = Path("evals") / "regressions"


class Progress(Protocol):
    """Who is told how far the work is; the loop does not know whether it is a terminal."""

    def start(self, stage: str, total: int) -> None:
        """A stage of `total` units begins; the one before it has ended."""
        ...

    def advance(self, n: int = 1, **figures: float) -> None:
        """`n` more units are done; figures are worth showing beside the bar."""
        ...

    def say(self, line: str) -> None:
        """Something that is worth a line of its own."""
        ...


class Silent:
    """Progress for nobody."""

    def start(self, stage: str, total: int) -> None:
        """See Progress."""

    def advance(self, n: int = 1, **figures: float) -> None:
        """See Progress."""

    def say(self, line: str) -> None:
        """See Progress."""


@dataclass
class Stage:
    """What a part of the loop has done so far; becomes a StageRow when it is finished."""

    name: str
    n_episodes: int = 0
    n_tool_calls: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    started_cpu: float = field(default_factory=time.process_time)

    def drop(self, counts: Mapping[str, int]) -> None:
        """Count rows that did not train, by reason."""
        for reason, n in counts.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + n

    def row(self) -> StageRow:
        """As it is stored."""
        return StageRow(
            name=self.name,
            n_episodes=self.n_episodes,
            n_tool_calls=self.n_tool_calls,
            wall_s=time.perf_counter() - self.started,
            cpu_s=time.process_time() - self.started_cpu,
            dropped=self.dropped,
            metrics=self.metrics,
        )


class Project:
    """One open project; `open_project` makes it and holds the store for one writer."""

    def __init__(
        self, folder: Path, config: Config, suite: Suite, store: Store, pool: Pool, progress: Progress
    ) -> None:
        self.folder, self.config, self.suite, self.store = folder, config, suite, store
        self.pool, self.progress = pool, progress
        self.registry = Registry(store)
        self.agent = ToolLoop()
        # Ids and seeds of episodes follow from it, so equal tasks and an equal seed give equal runs.
        self.run_id = f"{suite.hash}/{config.project.seed}"

    def rng(self, *name: object) -> random.Random:
        """Random numbers that depend on the run and `name` alone, however often it was interrupted."""
        return random.Random("/".join(map(str, (self.run_id, *name))))

    def version_folder(self, number: int) -> Path:
        """Where the weights of a version are."""
        return self.folder / POLICIES / f"v{number:04d}"

    async def gather(
        self,
        stage: Stage,
        tasks: Sequence[Task],
        policy: Policy | BatchPolicy,
        *,
        purpose: Purpose,
        version: int,
        group_size: int = 1,
        part: object = "",
    ) -> list[Judged]:
        """Roll out, judge, store: `group_size` episodes of each task, in order.

        Experience exists for the rest of the loop once it is on disk. `part` tells apart calls
        within one stage. Raises SandboxError or PolicyError when most episodes failed outside the agent.
        """
        planned = plan(
            tasks,
            run=self.run_id,
            stage=f"{stage.name}/{part}",
            purpose=purpose,
            policy_version=version,
            group_size=group_size,
        )
        crew = Crew(self.agent, policy, self.pool, self.config.policy.max_concurrent)
        rollouts = await roll_out(planned, crew, lambda _: self.progress.advance())
        judged = [(r.task, r.episode, r.trace, await judge(r.task, r.trace)) for r in rollouts]
        self.store.put_judged(stage.name, judged, first=stage.n_episodes)
        stage.n_episodes += len(judged)
        stage.n_tool_calls += sum(len(trace.tool_calls) for _, _, trace, _ in judged)
        return judged

    def begin(self, name: str) -> Stage:
        """A stage from its start; what an interrupted attempt at it left is removed."""
        self.store.forget_stage(name)
        return Stage(name)

    def finish(self, stage: Stage) -> None:
        """Mark a stage as done."""
        self.store.put_stage(stage.row())


@contextmanager
def open_project(
    folder: Path, backend: SandboxBackend, progress: Progress, **overrides: dict[str, Any]
) -> Iterator[Project]:
    """The project in `folder`, with boxes from `backend`. Raises ConfigError or StoreError."""
    config = load_config(folder, **overrides)
    suite = load_suite(folder / config.project.suite)
    for split in Split if config.policy.kind == "tiny" else (Split.heldout,):
        if not suite.split(split):
            raise ConfigError(f"suite {suite.name!r} has no {split} task; give some the split {split.value!r}")
    store = Store(folder / STORE)
    try:
        with store.lock():
            yield Project(folder, config, suite, store, SandboxPool(backend), progress)
    finally:
        store.close()


def mean_reward(judged: Sequence[Judged]) -> float:
    """Mean over scored episodes; 0.0 when none was scored."""
    rewards = [verdict.reward for *_, verdict in judged if verdict.reward is not None]
    return fmean(rewards) if rewards else 0.0
