"""(task, side, trial) -> Outcome: one episode of a suite of our own, judged, stored, and told in the gate's words.

What was lost for our reasons is tried again a few times, with pauses, and then handed on as lost: never as a 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from agentloop.costs.totals import Price, spent, total
from agentloop.failures.detectors.rules import Rule
from agentloop.gate.outcomes import Outcome, Side
from agentloop.judge.artifacts import Artifacts, collect, fresh_boxes, wanted
from agentloop.judge.group import judge_group
from agentloop.protocols import Pool, Sandbox
from agentloop.rollout.actors import Actor
from agentloop.rollout.episode import is_refused, plan, run_episode
from agentloop.sandbox.canaries import plant
from agentloop.types import Attempt, Episode, Purpose, RewardState, Task, Trace, Verdict

PAUSES_S = (1.0, 5.0)
"""Before each further attempt at a trial that was lost."""
MAX_WORDS = 300
"""Characters kept of what a person reads of a trial; what an agent said may be long."""


class Trials:
    """A `bank.Runner` over tasks of our own."""

    def __init__(
        self,
        tasks: Sequence[Task],
        sides: Mapping[Side, Actor],
        pool: Pool,
        *,
        run: str,
        keep: Callable[[Attempt], None] = lambda _: None,
        guess: Rule | None = None,
        pauses_s: Sequence[float] | None = None,
    ) -> None:
        """run: decides every seed, with the task, the side and the trial. keep: stores each attempt.

        guess: of `judge_group`. pauses_s: in place of PAUSES_S.
        """
        self._tasks = {task.id: task for task in tasks}
        self._sides, self._pool, self._run, self._keep = sides, pool, run, keep
        self._guess, self._pauses_s = guess, pauses_s

    async def __call__(self, task_id: str, side: Side, trial: int) -> Outcome:
        """See `bank.Runner`. Raises PluginError and ConfigError for a task's own mistake."""
        task = self._tasks[task_id]

        async def attempt() -> Outcome:
            done = await self._attempt(task, side, trial)
            self._keep(done)
            return outcome_of(done, side, trial, self._sides[side].price)

        return await until_kept(attempt, self._pauses_s)

    async def _attempt(self, task: Task, side: Side, trial: int) -> Attempt:
        stage = f"{side}/{trial}"
        [(_, episode)] = plan([task], run=self._run, stage=stage, purpose=Purpose.evaluate, policy_version=0)
        taken: Artifacts | None = None
        with TemporaryDirectory(prefix="agentloop-") if wanted(task) else nullcontext() as folder:

            async def take(task: Task, episode: Episode, box: Sandbox) -> None:
                nonlocal taken
                if folder is not None:
                    taken = await collect(task, box, Path(folder))

            rollout = await run_episode(
                task,
                episode,
                agent=self._sides[side].agent,
                policy=self._sides[side].policy,
                pool=self._pool,
                on_start=_plant,
                on_end=take,
            )
            fresh = fresh_boxes(task, self._pool, taken, episode.id) if taken is not None else None
            [verdict] = await judge_group(task, [rollout.trace], [fresh], self._guess)
        return Attempt(task=task, episode=rollout.episode, trace=rollout.trace, verdict=verdict)


async def until_kept(attempt: Callable[[], Awaitable[Outcome]], pauses_s: Sequence[float] | None = None) -> Outcome:
    """The first outcome that was not lost to infrastructure, or the last one.

    The outcome carries the cost of all attempts and `n_lost`, the number of those that were lost.
    pauses_s: in place of PAUSES_S.
    """
    outcome = await attempt()
    costs, n_lost = [outcome.cost_usd], int(outcome.state is RewardState.infra_failed)
    for pause_s in PAUSES_S if pauses_s is None else pauses_s:
        if outcome.state is not RewardState.infra_failed:
            break
        await asyncio.sleep(pause_s)
        outcome = await attempt()
        costs.append(outcome.cost_usd)
        n_lost += outcome.state is RewardState.infra_failed
    return outcome.model_copy(update={"cost_usd": total(costs), "n_lost": n_lost})


async def _plant(task: Task, episode: Episode, box: Sandbox) -> None:
    """Canaries, where an episode has a box of its own, as root."""
    if task.sandbox.root and not task.sandbox.read_only:
        await plant(box, episode.id)


def outcome_of(attempt: Attempt, side: Side, trial: int, price: Price) -> Outcome:
    """An attempt in the gate's words."""
    trace, verdict = attempt.trace, attempt.verdict
    took = spent(trace, verdict)
    return Outcome(
        task_id=attempt.task.id,
        policy=side,
        trial=trial,
        reward=verdict.reward if verdict.state is RewardState.scored else None,
        state=verdict.state,
        trace_id=trace.id,
        failure=verdict.critical.type.value if verdict.critical else None,
        why=_why(trace, verdict),
        cost_usd=total([*map(price, took.answers), took.judging_usd]),
        duration_s=round(trace.duration_s, 3),
        started_at=trace.started_at,
        refused=is_refused(trace),
    )


def _why(trace: Trace, verdict: Verdict) -> str | None:
    """On one line; None where there is nothing to explain."""
    if verdict.reward == 1.0:
        return None
    told = [score.error for score in verdict.scores if score.error]
    if verdict.state is not RewardState.scored:
        said = trace.error or "; ".join(told) or f"the verifiers gave {[score.value for score in verdict.scores]}"
    elif (critical := verdict.critical) is not None:
        at = "" if critical.step is None else f" at step {critical.step}"
        said = f"{critical.type.value}{at}: {critical.evidence}"
    else:
        said = "submitted nothing" if trace.answer is None else f"submitted {trace.answer!r}"
    return " ".join(said.split())[:MAX_WORDS]
