"""The first version of a tiny policy: imitate a demonstrator until copying works, then let it settle.

A model made from scratch must first learn to write a call and to copy what it saw; RL cannot
create a skill that never occurs. How good the demonstrator is, is not this file's business: what
it does wrong, the loop mends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from statistics import fmean

from agentloop.errors import TrainingError
from agentloop.loop.project import Project, Stage, mean_reward
from agentloop.policies.chat import train_tokenizer
from agentloop.policies.scripted import ScriptedPolicy
from agentloop.policies.tiny import TinyPolicy, new_model
from agentloop.store.bodies import unpack
from agentloop.train.demonstrations import demonstration, texts
from agentloop.train.sft import Sft
from agentloop.types import Purpose, RewardState, Sample, Split, Task, Trace

BATCH = 24
CHECK_EVERY = 50
"""Gradient steps between two looks at the validation split."""
EMERGED = 0.5
"""Share of the demonstrator's success at which copying has emerged and the learning rate may fall."""
SETTLE_STEPS = 120
"""Steps in which the learning rate then falls to nothing, which makes firm what was learned."""

Demonstration = tuple[Task, Trace, float]
"""(task, what was shown, its reward)."""


async def demonstrate(project: Project, demonstrator: ScriptedPolicy) -> list[Demonstration]:
    """Episodes of the demonstrator on train tasks: rolled out once, after that read from the store."""
    name = "demonstrate"
    train = project.suite.split(Split.train)
    if name not in project.store.stages():
        stage = await project.begin(name)
        n = project.config.warm_start.n_demonstrations
        project.progress.start("demonstrations", n)
        tasks = project.rng(name).choices(train, k=n)
        judged = await project.gather(stage, tasks, demonstrator, purpose=Purpose.demonstrate, version=0)
        stage.drop(Counter(str(v.state) for *_, v in judged if v.state is not RewardState.scored))
        project.finish(stage)
    by_id = {task.id: task for task in train}
    rows = project.store.stage_traces(name)
    return [
        (by_id[row.task_id], unpack(row.body)[0], row.reward)
        for row in rows
        if row.reward is not None and row.task_id in by_id
    ]


async def warm_start(project: Project, shown: Sequence[Demonstration]) -> tuple[TinyPolicy, Stage]:
    """A policy that does what `shown` shows, about as well, and the stage that made it.

    Raises TrainingError when copying has not emerged within the configured steps.
    """
    stage = await project.begin("warm-start")
    tokenizer = train_tokenizer(texts(trace for _, trace, _ in shown))
    model = new_model(tokenizer.get_vocab_size(), seed=project.config.project.seed)
    policy = TinyPolicy.of(model, tokenizer, temperature=project.config.policy.temperature)
    trainer = Sft(model, policy.chat.pad)
    samples = [demonstration(task, trace, policy.chat) for task, trace, _ in shown]
    batches = _batches(samples, project.rng("warm-start"))
    n_steps = await _until_emerged(project, stage, policy, trainer, batches, fmean(r for *_, r in shown))
    project.progress.start("warm start: settle", SETTLE_STEPS)
    for left in range(SETTLE_STEPS, 0, -1):
        metrics = trainer.step(next(batches), rate=left / SETTLE_STEPS)
        project.progress.advance(loss=metrics["loss"])
    stage.metrics["steps"] = n_steps + SETTLE_STEPS
    stage.metrics["validation"] = await validate(project, stage, policy, version=1, part="settled")
    return policy, stage


async def _until_emerged(
    project: Project, stage: Stage, policy: TinyPolicy, trainer: Sft, batches: Iterator[list[Sample]], shown: float
) -> int:
    """Train at the full rate until validation success reaches its share of `shown`; the steps it took."""
    limit = project.config.warm_start.max_steps
    validation = 0.0
    for step in range(1, limit + 1):
        if step % CHECK_EVERY == 1:
            project.progress.start(f"warm start: up to step {step + CHECK_EVERY - 1}", CHECK_EVERY)
        metrics = trainer.step(next(batches))
        project.progress.advance(loss=metrics["loss"], validation=validation)
        if step % CHECK_EVERY == 0 and step > CHECK_EVERY:
            validation = await validate(project, stage, policy, version=1, part=step)
            if validation >= EMERGED * shown:
                return step
    raise TrainingError(
        f"the warm start learned too little in {limit} steps: validation success {validation:.2f}, demonstrations "
        f"{shown:.2f}; give it more or simpler demonstrations, or more steps ([warm_start] in agentloop.toml)"
    )


def _batches(samples: Sequence[Sample], rng: Random) -> Iterator[list[Sample]]:
    """Batches without end; eight at a time are sorted by length, which saves half of the padding."""
    while True:
        drawn = sorted(rng.choices(samples, k=8 * BATCH), key=lambda s: len(s.token_ids))
        parts = [drawn[i * BATCH : (i + 1) * BATCH] for i in range(8)]
        rng.shuffle(parts)
        yield from parts


async def validate(project: Project, stage: Stage, policy: TinyPolicy, *, version: int, part: object) -> float:
    """Success on the validation split, which decides when to stop and nothing else."""
    tasks = project.suite.split(Split.validation)
    judged = await project.gather(
        stage, tasks, policy, purpose=Purpose.validate, version=version, group_size=3, part=f"validate/{part}"
    )
    return mean_reward(judged)
