"""Makes versions of the tiny policy: a warm start, then GRPO on its own episodes, a turn at a time.

Each turn goes on from the newest version, promoted or not: what the gate says of a version on the
held-out tasks must not decide what is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from random import Random

import torch

from agentloop.config.layout import STATE
from agentloop.errors import ConfigError, TrainingError, boundary, counted
from agentloop.identity import Identity
from agentloop.loop.control import is_due, run_control
from agentloop.loop.project import Project
from agentloop.loop.stage import Stage, begin
from agentloop.loop.warm_start import WARM_START, demonstrate, validate, warm_start
from agentloop.policies.scripted import ScriptedPolicy
from agentloop.policies.tiny import TinyPolicy
from agentloop.registry.artifacts import WEIGHTS
from agentloop.store.bodies import unpack
from agentloop.train.advantages import with_advantages
from agentloop.train.checkpoint import copy_version, load_trainer, save_version, version_acting
from agentloop.train.curriculum import Curriculum
from agentloop.train.demonstrations import demonstration
from agentloop.train.grpo import Grpo, GrpoSettings
from agentloop.train.samples import build_samples
from agentloop.types import PolicyVersion, Purpose, Sample, Split, StageKey, StageKind, VersionKind

MIN_RATE = 0.25
"""Share of the learning rate that is kept when little is left to learn; below a quarter failing, it falls to this."""
N_REVIVAL = 4
"""Stored successes that are imitated for each group in which every episode failed."""


class TinyTrainer:
    """See `protocols.Trainer`."""

    def __init__(self, project: Project, demonstrator: ScriptedPolicy, acting: str) -> None:
        """acting: identity of the project's [policy] and [agent] as they are now."""
        torch.set_num_threads(project.config.train.n_threads)
        self.project = project
        self.demonstrator = demonstrator
        self.acting = acting

    def policy(self, version: PolicyVersion) -> TinyPolicy:
        """Its weights, loaded. Raises ConfigError when `version` acted under other settings or another agent."""
        _must_have_weights(version)
        if self._acted_otherwise(version):
            raise ConfigError(
                f"v{version.number} acted under other [policy] or [agent] settings and has no result on this suite; "
                "restore them and the agent's files and run the loop once, then change them again"
            )
        folder = self.project.version_folder(version.number)
        return TinyPolicy(folder / WEIGHTS, temperature=self.project.config.policy.temperature)

    async def first(self) -> PolicyVersion:
        """Warm-start from the demonstrator."""
        demonstrations = await demonstrate(self.project, self.demonstrator)
        policy, stage = await warm_start(self.project, demonstrations)
        right = sum(reward >= 1.0 for *_, reward in demonstrations) / len(demonstrations)
        note = f"warm start on {len(demonstrations):,} demonstrations, {right:.0%} of them right"
        return self._publish(1, None, policy, None, {}, stage, note)

    async def next(self, newest: PolicyVersion) -> PolicyVersion | None:
        """A turn of GRPO from `newest`, unless the validation split is solved or the turns are used up.

        Under other settings or another agent the same weights are another version, gated before anything is trained.
        """
        _must_have_weights(newest)
        if self._acted_otherwise(newest):
            return await self._as_it_acts_now(newest)
        reason = self._finished(newest)
        if reason:
            self.project.progress.say(reason)
            if is_due(self.project):
                await run_control(self.project, await demonstrate(self.project, self.demonstrator))
            return None
        return await self._turn(newest)

    def _finished(self, newest: PolicyVersion) -> str | None:
        train = self.project.config.train
        n_turns = newest.number - 1
        success = self.project.store.stages()[stage_of(newest.number).name].metrics["validation"]
        if n_turns and success >= train.stop_at:
            return f"finished: v{newest.number} solves {success:.0%} of the validation tasks"
        if n_turns >= train.max_turns:
            return (
                f"finished: {counted(n_turns, 'turn')}, v{newest.number} solves {success:.0%} of the validation tasks; "
                f"for more, raise [train] max_turns (now {train.max_turns}) and run the loop again"
            )
        return None

    def _acted_otherwise(self, version: PolicyVersion) -> bool:
        return version_acting(self.project.version_folder(version.number)) not in (None, self.acting)

    async def _as_it_acts_now(self, parent: PolicyVersion) -> PolicyVersion:
        """The weights of `parent` as a version of their own, under the settings and the agent as they are now."""
        number = parent.number + 1
        folder = self.project.version_folder(number)
        stage = await begin(self.project, stage_of(number))
        with boundary(TrainingError, "cannot save a version; mend it and run the same command again", folder=folder):
            sha256 = copy_version(self.project.version_folder(parent.number), folder, acting=self.acting)
        policy = TinyPolicy(folder / WEIGHTS, temperature=self.project.config.policy.temperature)
        acting = Identity(self.acting, {})
        stage.metrics["validation"] = await validate(
            self.project, stage, policy, version=number, part="end", identity=acting
        )
        note = f"the weights of v{parent.number} under other [policy] or [agent] settings"
        return self._register(number, parent.number, sha256, stage, note)

    async def _turn(self, parent: PolicyVersion) -> PolicyVersion:
        config = self.project.config.train
        number = parent.number + 1
        stage = await begin(self.project, stage_of(number), anew=True)
        policy = self.policy(parent)
        trainer = Grpo(policy.model, policy.chat.pad, GrpoSettings(learning_rate=config.learning_rate))
        rates = load_trainer(self.project.version_folder(parent.number), trainer.optimizer)
        curriculum = Curriculum(self.project.suite.split(Split.train), rates)
        n_episodes = config.steps_per_turn * config.n_tasks * config.group_size
        self.project.progress.start(f"turn {number - 1}: roll out and train", n_episodes)
        for step in range(config.steps_per_turn):
            metrics = await self._update(stage, step, parent, policy, trainer, curriculum)
            self.project.progress.advance(0, **metrics)
        stage.metrics["validation"] = await validate(self.project, stage, policy, version=number, part="end")
        note = f"GRPO, {config.steps_per_turn} updates on {n_episodes:,} episodes"
        return self._publish(number, parent.number, policy, trainer.optimizer, curriculum.rates, stage, note)

    async def _update(
        self,
        stage: Stage,
        step: int,
        parent: PolicyVersion,
        policy: TinyPolicy,
        trainer: Grpo,
        curriculum: Curriculum,
    ) -> dict[str, float]:
        """Draw tasks, roll out groups, train on what they say; figures worth showing."""
        config = self.project.config.train
        rng = self.project.rng(stage.name, step)
        attempts = await stage.gather(
            curriculum.draw(config.n_tasks, rng),
            policy,
            purpose=Purpose.train,
            version=parent.number,
            group_size=config.group_size,
            part=step,
        )
        samples, unfit = build_samples(attempts, temperature=policy.temperature)
        revival = self._observe(stage, samples, policy, curriculum, rng)
        useful, flat = with_advantages(samples)
        stage.drop(unfit)
        stage.drop(flat)
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

    def _publish(
        self,
        number: int,
        parent: int | None,
        policy: TinyPolicy,
        optimizer: torch.optim.Optimizer | None,
        rates: dict[str, float],
        stage: Stage,
        note: str,
    ) -> PolicyVersion:
        """Weights to disk, then the stage, then the version: whatever is cut short is made again."""
        folder = self.project.version_folder(number)
        with boundary(TrainingError, "cannot save a version; mend it and run the same command again", folder=folder):
            sha256 = save_version(folder, policy, optimizer, rates, acting=self.acting)
        return self._register(number, parent, sha256, stage, note)

    def _register(self, number: int, parent: int | None, sha256: str, stage: Stage, note: str) -> PolicyVersion:
        stage.finish()
        return self.project.registry.add(
            number=number,
            parent=parent,
            kind=VersionKind.weights,
            artifact=str(self.project.version_folder(number).relative_to(self.project.folder / STATE)),
            sha256=sha256,
            config_hash=self.project.config.hash,
            note=note,
        )


def _must_have_weights(version: PolicyVersion) -> None:
    if version.kind is not VersionKind.weights:
        raise ConfigError(
            f"v{version.number} is a {version.kind} policy, which has no weights to train from; "
            "set [policy] back to it, or make another project for 'tiny'"
        )


def stage_of(number: int) -> StageKey:
    """The stage that makes version `number`."""
    return WARM_START if number == 1 else StageKey(StageKind.turn, number)
