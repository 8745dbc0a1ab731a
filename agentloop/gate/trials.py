"""(task, side, trial) -> Outcome: one attempt at a task, stored, and reported in the gate's words.

What was lost for our reasons is repeated (`rollout/retry.py`), and then handed on as lost: never as a 0.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from agentloop.costs.totals import Price, spent, total
from agentloop.failures.detectors.rules import Rule
from agentloop.gate.outcomes import Outcome, Side
from agentloop.printable import shortened
from agentloop.protocols import Pool
from agentloop.rollout.actors import Actor
from agentloop.rollout.attempt import Crew, run_attempt
from agentloop.rollout.plan import plan
from agentloop.rollout.refusals import is_refused
from agentloop.rollout.retry import is_lost
from agentloop.types import (
    Attempt,
    Episode,
    Failure,
    FailureType,
    Purpose,
    RewardState,
    StopReason,
    Task,
    Trace,
    Verdict,
)

MAX_WORDS = 300
"""Characters kept of what a person reads of a trial; what an agent said may be long."""
LIMITS = (StopReason.step_limit, StopReason.time_limit, StopReason.cost_limit)
"""Ends that the evidence of a failure does not name."""
Keep = Callable[[Attempt], Awaitable[Attempt]]
"""Stores an attempt; the attempt as it is stored."""


async def keep_nothing(attempt: Attempt) -> Attempt:
    """A Keep without a store."""
    return attempt


class Storage(NamedTuple):
    """Where attempts are stored."""

    keep: Keep = keep_nothing
    lookup: Callable[[Task, Episode, Actor], Attempt | None] = lambda *_: None
    """The attempt that is stored already, which is then not made again."""
    owner: str = ""
    """Of `plan`."""


NO_STORAGE = Storage()


class Trials:
    """A `bank.Runner` over tasks."""

    def __init__(
        self,
        tasks: Sequence[Task],
        sides: Mapping[Side, Actor],
        pool: Pool,
        *,
        run: str,
        storage: Storage = NO_STORAGE,
        guess: Rule | None = None,
        pauses_s: Sequence[float] | None = None,
    ) -> None:
        """run: decides every seed, with the task, the side and the trial. guess: of `Crew`. pauses_s: of `repeated`."""
        self._tasks = {task.id: task for task in tasks}
        self._sides = sides
        self._pool = pool
        self._run = run
        self._storage = storage
        self._guess = guess
        self._pauses_s = pauses_s

    async def __call__(self, task_id: str, side: Side, trial: int) -> Outcome:
        """See `bank.Runner`. Raises PluginError and ConfigError for a task's own mistake."""
        task = self._tasks[task_id]
        actor = self._sides[side]
        lost: list[Attempt] = []
        [(_, episode)] = plan(
            [task],
            run=self._run,
            stage=f"{side}/{trial}",
            purpose=Purpose.evaluate,
            policy_version=actor.version,
            owner=self._storage.owner,
        )
        attempt = self._storage.lookup(task, episode, actor)
        if attempt is None:
            crew = Crew(actor, self._pool, self._guess)
            attempt = await run_attempt(task, episode, crew, pauses_s=self._pauses_s, on_lost=lost.append)
            attempt = await self._storage.keep(attempt)
        return with_lost(outcome_of(attempt, side, trial, actor.price), attempt, lost, actor.price)


def with_lost(outcome: Outcome, attempt: Attempt, lost: Sequence[Attempt], price: Price) -> Outcome:
    """`outcome` with the number of attempts that were lost, itself included, and the cost of all."""
    n_lost = attempt.trace.n_lost + is_lost(attempt.episode)
    cost_usd = total([*(cost_of(one, price) for one in lost), outcome.cost_usd])
    return outcome.model_copy(update={"cost_usd": cost_usd, "n_lost": n_lost})


def cost_of(attempt: Attempt, price: Price) -> float | None:
    """What its answers and its judging cost; None where nobody knows."""
    took = spent(attempt.trace, attempt.verdict)
    return total([*map(price, took.answers), took.judging_usd])


def outcome_of(attempt: Attempt, side: Side, trial: int, price: Price) -> Outcome:
    """An attempt in the gate's words.

    No reward of an agent that tampered with its tests can be believed; the gate counts that as a failure.
    """
    trace = attempt.trace
    verdict = attempt.verdict
    critical = verdict.critical
    has_tampered = critical is not None and critical.type is FailureType.outcome_reward_hack
    failure = critical.type.value if critical else None
    if any(one.type is FailureType.outcome_reward_hack for one in verdict.failures):
        failure = FailureType.outcome_reward_hack.value  # also of one that passed, which has no critical failure
    state = verdict.state
    reward = verdict.reward
    if state is RewardState.unscored and has_tampered:
        state = RewardState.scored
        reward = 0.0
    return Outcome(
        task_id=attempt.task.id,
        policy=side,
        trial=trial,
        reward=reward if state is RewardState.scored else None,
        state=state,
        trace_id=trace.id,
        failure=failure,
        why=_why(trace, verdict),
        cost_usd=cost_of(attempt, price),
        duration_s=round(trace.duration_s, 3),
        started_at=trace.started_at,
        refused=is_refused(trace),
    )


def _why(trace: Trace, verdict: Verdict) -> str | None:
    """On one line; None where there is nothing to explain."""
    if verdict.reward == 1.0:
        return None
    critical = verdict.critical
    if verdict.state is not RewardState.scored:
        errors = [score.error for score in verdict.scores if score.error]
        values = [score.value for score in verdict.scores]
        words = trace.error or "; ".join(errors) or f"the verifiers gave {values}"
    elif critical is not None:
        words = _failure_words(critical, trace)
    elif trace.answer is None:
        words = "submitted nothing"
    else:
        words = f"submitted {trace.answer!r}"
    return shortened(words, MAX_WORDS)


def _failure_words(critical: Failure, trace: Trace) -> str:
    """The failure that decided, with the whole error of a run that one ended: its evidence quotes the beginning."""
    if critical.step is None:
        return f"{critical.type.value}: {trace.error or critical.evidence}"
    limit = f" ({trace.stop_reason})" if trace.stop_reason in LIMITS else ""
    return f"{critical.type.value} at step {critical.step}{limit}: {critical.evidence}"
