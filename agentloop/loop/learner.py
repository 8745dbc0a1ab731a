"""Makes versions of the tiny policy: a warm start, then GRPO on its own episodes, a turn at a time.

Each turn goes on from the newest version, promoted or not: what the gate says of a version on the
held-out tasks must not decide what is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from random import Random

import torch

from agentloop.errors import TrainingError, boundary
from agentloop.loop.making import VALIDATION, stage_of
from agentloop.loop.project import Project
from agentloop.loop.stage import Stage, begin
from agentloop.loop.warm_start import (
    WARM_START,
    demonstrate,
    demonstration_pairs,
    demonstrator,
    validate,
    warm_start,
)
from agentloop.policies.tiny import TinyPolicy
from agentloop.protocols import Draft, Experience
from agentloop.registry.artifacts import WEIGHTS
from agentloop.store.bodies import unpack
from agentloop.train.advantages import with_advantages
from agentloop.train.checkpoint import load_trainer, save_version
from agentloop.train.curriculum import Curriculum
from agentloop.train.demonstrations import demonstration
from agentloop.train.grpo import Grpo, GrpoSettings
from agentloop.train.samples import build_samples
from agentloop.types import PolicyVersion, Purpose, Sample, Split, StageKey, VersionKind

MIN_RATE = 0.25
"""Share of the learning rate that is kept when little is left to learn; below a quarter failing, it falls to this."""
N_REVIVAL = 4
"""Stored successes that are imitated for each group in which every episode failed."""


class TinyTrainer:
    """See `protocols.Trainer`."""

    name, version = "grpo", "1"
    makes = VersionKind.weights

    def __init__(
        self,
        project: Project,
        *,
        steps_per_turn: int,
        n_tasks: int,
        group_size: int,
        learning_rate: float,
        stop_at: float,
        n_threads: int,
    ) -> None:
        """steps_per_turn: updates between two versions. n_tasks: tasks of one update. group_size: episodes a task.

        An episode's reward is compared with those of its group. stop_at: success on the validation split at which
        nothing is left to learn. n_threads: of torch; one is the cheapest for models this small, and keeps a run
        repeatable.
        """
        torch.set_num_threads(n_threads)
        self.project = project
        self._steps_per_turn = steps_per_turn
        self._n_tasks = n_tasks
        self._group_size = group_size
        self._learning_rate = learning_rate
        self._stop_at = stop_at

    async def first(self, draft: Draft, experience: Experience) -> str:
        """Warm-start from the demonstrator."""
        demonstrations = await demonstrate(self.project, demonstrator(self.project))
        policy, stage = await warm_start(self.project, demonstrations)
        right = sum(reward >= 1.0 for *_, reward in demonstrations) / len(demonstrations)
        with boundary(TrainingError, "cannot save a version; mend it and run the same command again"):
            save_version(draft.folder, policy, None, {})
        draft.learn_from(demonstration_pairs(self.project))
        stage.finish()
        return f"warm start on {len(demonstrations):,} demonstrations, {right:.0%} of them right"

    async def improve(self, parent: PolicyVersion, draft: Draft, experience: Experience) -> str | None:
        """A turn of GRPO from `parent`, unless the validation split is solved."""
        success = self.project.store.stages()[made_by(parent.number).name].metrics[VALIDATION]
        if parent.number > 1 and success >= self._stop_at:
            draft.progress.say(f"finished: v{parent.number} solves {success:.0%} of the validation tasks")
            return None
        return await self._turn(parent, draft)

    async def _turn(self, parent: PolicyVersion, draft: Draft) -> str:
        stage = await begin(self.project, stage_of(draft.number), anew=True)
        folder = self.project.version_folder(parent.number)
        policy = TinyPolicy(folder / WEIGHTS, temperature=self.project.config.policy.temperature)
        trainer = Grpo(policy.model, policy.chat.pad, GrpoSettings(learning_rate=self._learning_rate))
        rates = load_trainer(folder, trainer.optimizer)
        curriculum = Curriculum(self.project.suite.split(Split.train), rates)
        n_episodes = self._steps_per_turn * self._n_tasks * self._group_size
        draft.progress.start(f"turn {draft.number - 1}: roll out and train", n_episodes)
        for step in range(self._steps_per_turn):
            metrics = await self._update(stage, step, parent, draft, policy, trainer, curriculum)
            draft.progress.advance(0, **metrics)
        stage.metrics[VALIDATION] = await validate(self.project, stage, policy, version=draft.number, part="end")
        with boundary(TrainingError, "cannot save a version; mend it and run the same command again"):
            save_version(draft.folder, policy, trainer.optimizer, curriculum.rates)
        draft.learn_from((), stage.dropped)
        stage.finish()
        return f"GRPO, {self._steps_per_turn} updates on {n_episodes:,} episodes"

    async def _update(
        self,
        stage: Stage,
        step: int,
        parent: PolicyVersion,
        draft: Draft,
        policy: TinyPolicy,
        trainer: Grpo,
        curriculum: Curriculum,
    ) -> dict[str, float]:
        """Draw tasks, roll out groups, train on what they say; figures worth showing."""
        rng = self.project.rng(stage.name, step)
        attempts = await stage.gather(
            curriculum.draw(self._n_tasks, rng),
            policy,
            purpose=Purpose.train,
            version=parent.number,
            group_size=self._group_size,
            part=step,
        )
        samples, unfit = build_samples(attempts, temperature=policy.temperature)
        revival = self._observe(stage, samples, policy, curriculum, rng)
        useful, flat = with_advantages(samples)
        stage.drop(unfit)
        stage.drop(flat)
        used = {sample.episode_id for sample in useful}
        draft.learn_from(attempt.pair for attempt in attempts if attempt.episode.id in used)
        rng.shuffle(useful)
        rate = min(1.0, max(MIN_RATE, 4.0 * curriculum.remaining))
        metrics = trainer.step(useful, rate=rate)
        skipped = metrics["skipped_steps"]
        if revival:
            skipped += trainer.imitate(revival, rate=rate)["skipped_steps"]
            stage.metrics["n_revival"] = stage.metrics.get("n_revival", 0) + len(revival)
        if skipped:
            stage.metrics["n_skipped_steps"] = stage.metrics.get("n_skipped_steps", 0) + skipped
        return {"reward": sum(s.reward for s in samples) / max(len(samples), 1), "entropy": metrics["entropy"]}

    def _observe(
        self, stage: Stage, samples: Sequence[Sample], policy: TinyPolicy, curriculum: Curriculum, rng: Random
    ) -> list[Sample]:
        """Tell the curriculum how each group did; for groups that failed whole, what once passed in their pool."""
        revival: list[Sample] = []
        for _, group in groupby(samples, key=lambda sample: sample.group):
            members = list(group)
            pool = members[0].pool
            curriculum.observe(pool, [sample.reward for sample in members])
            if max(sample.reward for sample in members) <= 0.0:
                revival += self._revive(stage, pool, policy, rng)
        return revival

    def _revive(self, stage: Stage, pool: str, policy: TinyPolicy, rng: Random) -> list[Sample]:
        """Rows of `pool` that once passed: the demonstrator's, else the policy's own; says so when there are none."""
        tasks = {task.id: task for task in self.project.suite.split(Split.train)}
        store = self.project.store
        rows = store.passing(pool, Purpose.demonstrate) or store.passing(pool, Purpose.train)
        passed = [row for row in rows if row.task_id in tasks]
        if not passed and f"n_dead {pool}" not in stage.metrics:
            stage.metrics[f"n_dead {pool}"] = 1
            self.project.progress.say(
                f"pool {pool!r}: a whole group failed and nothing has ever passed there to learn from; "
                "give its tasks a solution, or add easier ones"
            )
        chosen = rng.sample(passed, min(N_REVIVAL, len(passed)))
        return [demonstration(tasks[str(row.task_id)], unpack(row.body)[0], policy.chat) for row in chosen]


def made_by(number: int) -> StageKey:
    """The stage that made version `number`."""
    return WARM_START if number == 1 else stage_of(number)
