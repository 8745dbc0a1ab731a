"""A project on disk, opened: its settings, tasks, memory and versions, and the way to gather experience.

agentloop.toml        what is set                    evals/      suites, failed/ and regressions/
sandboxes/            what boxes are made of         traces/     store.db: every trace
.agentloop/policies/  one folder a version           report.html what came of it
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from agentloop.abilities import is_on_host
from agentloop.agents.choose import choose_agent
from agentloop.agents.gym.loop import GymLoop
from agentloop.config.layout import POLICIES, refuse_earlier_layout
from agentloop.config.settings import STORE, Config, known_secrets, load_config, suite_folder
from agentloop.costs.energy import Meter, Used
from agentloop.errors import ConfigError, counted
from agentloop.failures.learned.scorer import load_scorer
from agentloop.judge.artifacts import Artifacts, collect, fresh_boxes
from agentloop.judge.checks import check_environments, check_verifiers
from agentloop.judge.group import judge_group
from agentloop.loop.held_out import trainable
from agentloop.policies.lockstep import BatchPolicy
from agentloop.progress import Progress
from agentloop.protocols import Agent, Policy, Pool, Sandbox, SandboxBackend
from agentloop.registry.versions import Registry
from agentloop.rollout.episode import MAX_INFRA_SHARE, Crew, Rollout, is_mistaken, plan, refuse_broken, roll_out
from agentloop.sandbox.canaries import plant
from agentloop.sandbox.ladder import refuse_unconfined
from agentloop.sandbox.pool import SandboxPool
from agentloop.sandbox.replay import Recording, ReplayBackend
from agentloop.store.store import Store
from agentloop.store.tables import StageRow
from agentloop.suites.suite import Suite, load_suite
from agentloop.types import Attempt, Episode, EpisodeState, Purpose, RewardState, Split, Task, Verdict

REPORT = Path("report.html")
EVALS = Path("evals")


@dataclass
class Stage:
    """What a part of the loop has done so far; becomes a StageRow when it is finished."""

    name: str
    n_episodes: int = 0
    n_tool_calls: int = 0
    n_infra_failed: int = 0
    """Attempts, those that were tried again included."""
    n_lost: Counter[str] = field(default_factory=Counter)
    """Episode -> those of `n_infra_failed` that were its attempts."""
    dropped: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    meter: Meter | None = None
    """Measures energy while the stage is at work."""
    started_with: Used = field(init=False)
    started: float = field(default_factory=time.perf_counter)
    started_cpu: float = field(default_factory=time.process_time)

    def __post_init__(self) -> None:
        self.started_with = self.meter.read() if self.meter else Used()

    def drop(self, counts: Mapping[str, int]) -> None:
        """Count rows that did not train, by reason."""
        for reason, n in counts.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + n

    def row(self) -> StageRow:
        """As it is stored."""
        used = self.meter.read().since(self.started_with).metrics if self.meter else {}
        return StageRow(
            name=self.name,
            n_episodes=self.n_episodes,
            n_tool_calls=self.n_tool_calls,
            wall_s=time.perf_counter() - self.started,
            cpu_s=time.process_time() - self.started_cpu,
            dropped=self.dropped,
            metrics={**self.metrics, **used, "n_infra_failed": self.n_infra_failed},
        )


class Project:
    """One open project; `open_project` makes it and holds the store for one writer."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        suite: Suite,
        store: Store,
        pool: Pool,
        progress: Progress,
        meter: Meter | None = None,
    ) -> None:
        self.meter = meter
        self.folder, self.config, self.suite, self.store = folder, config, suite, store
        self.pool, self.progress = pool, progress
        self.registry = Registry(store)
        plays = suite.tasks[0].environment is not None
        self.agent: Agent = GymLoop() if plays else choose_agent(config.agent, folder)
        scorer = load_scorer(folder)
        self.guess = scorer.guess if scorer else None
        # Ids and seeds of episodes follow from it, so equal tasks and an equal seed give equal runs.
        self.run_id = f"{suite.hash}/{config.project.seed}"
        self._answers = False
        """Whether an episode has ended by itself since the project was opened."""

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
    ) -> list[Attempt]:
        """Roll out, judge, store: `group_size` episodes of each task, in order.

        Experience exists for the rest of the loop once it is on disk. `part` tells apart calls
        within one stage. Raises SandboxError or PolicyError when most episodes failed outside the agent,
        ConfigError when no verifier scored any; what happened is stored all the same.
        """
        planned = plan(
            tasks,
            run=self.run_id,
            stage=f"{stage.name}/{part}",
            purpose=purpose,
            policy_version=version,
            group_size=group_size,
        )
        with TemporaryDirectory(prefix="agentloop-") as kept:
            taken: dict[str, Artifacts] = {}

            async def take(task: Task, episode: Episode, sandbox: Sandbox) -> None:
                folder = Path(kept) / f"{episode.id}-{len(taken)}"
                taken[episode.id] = await collect(task, sandbox, folder)

            crew = Crew(self.agent, policy, self.pool, self.config.policy.max_concurrent, _plant, take)
            rollouts = await self._roll_out(planned, crew, lambda rollout: self._note(stage, rollout))
            attempts = [one for group in _groups(rollouts) for one in await self._judge(group, taken)]
        self.store.put_attempts(stage.name, attempts, first=stage.n_episodes)
        stage.n_episodes += len(attempts)
        stage.n_tool_calls += sum(len(attempt.trace.tool_calls) for attempt in attempts)
        refuse_broken(rollouts)
        _refuse_unscored([attempt.verdict for attempt in attempts])
        return attempts

    async def _roll_out(
        self, planned: Sequence[tuple[Task, Episode]], crew: Crew, on_done: Callable[[Rollout], None]
    ) -> list[Rollout]:
        """All that is planned, or only a probe that shows that nothing answers: a wrong port, a wrong API key.

        The probe is the first episode. Where a mistake in the settings seems to have ended it, two episodes of other
        tasks join it, because an endpoint may refuse one task alone.
        """
        if self._answers or isinstance(crew.policy, BatchPolicy):
            return await roll_out(planned, crew, on_done)
        probe = await roll_out(planned[:1], crew, on_done)
        if any(is_mistaken(rollout.trace) for rollout in probe):
            others = [(task, episode) for task, episode in planned if task.id != planned[0][0].id]
            probe += await roll_out(others[:2], crew, on_done)
        n_mistaken = sum(is_mistaken(rollout.trace) for rollout in probe)
        n_lost = sum(rollout.episode.state is EpisodeState.infra_failed for rollout in probe)
        self._answers = max(n_mistaken, n_lost) <= MAX_INFRA_SHARE * len(probe)  # else `refuse_broken` raises
        if not self._answers:
            return probe
        done = {rollout.episode.id: rollout for rollout in probe}
        rest = [(task, episode) for task, episode in planned if episode.id not in done]
        done |= {rollout.episode.id: rollout for rollout in await roll_out(rest, crew, on_done)}
        return [done[episode.id] for _, episode in planned]

    async def _judge(self, group: Sequence[Rollout], taken: Mapping[str, Artifacts]) -> list[Attempt]:
        task = group[0].task
        fresh = [
            fresh_boxes(task, self.pool, taken[r.episode.id], r.episode.id) if r.episode.id in taken else None
            for r in group
        ]
        verdicts = await judge_group(task, [r.trace for r in group], fresh, self.guess)
        return [
            Attempt(task=r.task, episode=r.episode, trace=r.trace, verdict=verdict)
            for r, verdict in zip(group, verdicts, strict=True)
        ]

    def _note(self, stage: Stage, rollout: Rollout) -> None:
        """Count an attempt: also one that is tried again has failed for our reasons."""
        if rollout.episode.state is EpisodeState.infra_failed:
            stage.n_infra_failed += 1
            stage.n_lost[rollout.episode.id] += 1
        else:
            self.progress.advance()

    async def begin(self, name: str, *, resume: bool = False) -> Stage:
        """A stage from its start, in fresh sandboxes. What an interrupted run of it left in the store is removed.

        resume: keep that, because the caller goes on from a checkpoint, and removes what came after it.
        """
        await self.pool.renew()
        if not resume:
            self.store.forget_stage(name)
        return Stage(name, meter=self.meter)

    def finish(self, stage: Stage) -> None:
        """Mark a stage as done."""
        self.store.put_stage(stage.row())


async def _plant(task: Task, episode: Episode, box: Sandbox) -> None:
    """Canaries, where an episode has a box of its own, as root."""
    if task.sandbox.root and not task.sandbox.read_only:
        await plant(box, episode.id)


@contextmanager
def open_project(
    folder: Path, backend: SandboxBackend, progress: Progress, **overrides: dict[str, Any]
) -> Iterator[Project]:
    """The project in `folder`, with boxes from `backend`. Raises ConfigError or StoreError."""
    config = load_config(folder, **overrides)
    refuse_earlier_layout(folder)
    refuse_unconfined(backend, allowed=config.sandbox.allow_unconfined)
    _refuse_training_on_host(config, folder)
    if config.sandbox.journals is not None and backend.name != ReplayBackend.name:
        backend = Recording(backend, folder / config.sandbox.journals)
    suite = load_suite(suite_folder(folder, config))
    for split in Split if config.policy.kind == "tiny" else (Split.heldout,):
        if not suite.split(split):
            raise ConfigError(f"suite {suite.name!r} has no {split} task; give some the split {split.value!r}")
    check_verifiers(suite)
    check_environments(suite)
    suite = trainable(folder / EVALS, suite, progress.say)
    store = Store(folder / STORE, secrets=known_secrets(folder))
    try:
        with store.lock(), Meter() as meter:
            yield Project(folder, config, suite, store, SandboxPool(backend), progress, meter)
    finally:
        store.close()


def _refuse_training_on_host(config: Config, folder: Path) -> None:
    """Raises ConfigError where weights would learn from an agent that can read the answers, unless that is allowed."""
    is_trained = config.policy.kind == "tiny" and not config.agent.is_built_in
    if is_trained and not config.sandbox.allow_unconfined and is_on_host(choose_agent(config.agent, folder)):
        raise ConfigError(
            f"[agent] kind = {config.agent.kind!r} acts on this machine and can read the answers of the suite, so no "
            "weights are trained on it; choose another agent, or accept that: [sandbox] allow_unconfined = true"
        )


def _groups(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Episodes that are compared with each other, in the order of the plan."""
    return [list(group) for _, group in groupby(rollouts, key=lambda rollout: rollout.episode.group)]


def _refuse_unscored(verdicts: Sequence[Verdict]) -> None:
    """ConfigError with the first verifier's words when none of `verdicts` could be scored, and none only waits."""
    if any(score.waiting for verdict in verdicts for score in verdict.scores):
        return
    if not any(verdict.state is RewardState.scored for verdict in verdicts) and (why := unscored(verdicts)):
        raise ConfigError(f"{why}; mend the verifier, then run the same command again")


def unscored(verdicts: Sequence[Verdict]) -> str | None:
    """How many of `verdicts` have no reward for their verifiers' sake, and the first one's words; None for none."""
    without = [v for v in verdicts if v.state in (RewardState.unscored, RewardState.disputed)]
    if not without:
        return None
    return f"{len(without)} of {counted(len(verdicts), 'episode')} could not be scored: {why_unscored(without[0])}"


def why_unscored(verdict: Verdict) -> str:
    """The first verifier that gave no number, and its words; or what each gave, when they contradict each other."""
    if verdict.state is RewardState.disputed:
        gave = ", ".join(f"{score.verifier} {score.value:g}" for score in verdict.scores if score.value is not None)
        return f"the verifiers contradict each other ({gave}); `agentloop judge queue` lists them for a person"
    score = next((score for score in verdict.scores if score.error), None)
    return f"verifier {score.verifier!r}: {score.error}" if score else "no verifier gave a reason"


def mean_reward(attempts: Sequence[Attempt]) -> float:
    """Mean over scored episodes; 0.0 when none was scored."""
    rewards = [attempt.verdict.reward for attempt in attempts]
    scored = [reward for reward in rewards if reward is not None]
    return fmean(scored) if scored else 0.0
