"""The doer of units of the kind `rollout`: one cohort of a plan becomes attempts, which its worker stores.

The attempts are made by `LocalWork`, as everywhere. They are written in the transaction that marks the unit as done, so
a unit has all of its attempts or none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from agentloop.errors import CapabilityError
from agentloop.failures.detectors.rules import Rule
from agentloop.policies.lockstep import BatchPolicy
from agentloop.protocols import Pool
from agentloop.rollout.plan import stable_id
from agentloop.store.attempts import Placed
from agentloop.store.claims import Claimed, Effect
from agentloop.types import Attempt, Unit
from agentloop.work.local import LocalWork
from agentloop.work.work import Ask

KIND = "rollout"
LIMIT_S = 86_400.0
"""Maximum duration of a cohort, whose attempts have the limits of their tasks."""
Resolve = Callable[[Claimed], Ask]
"""The ask of a unit's cohort: its plan is the cohort. Raises CapabilityError if this process does not have it."""


def rollout_unit(key: str, cohort: Ask, plan: str, n_seats: int, needs: Sequence[str]) -> Unit:
    """The unit of one cohort. plan: hash of everything that is asked for. n_seats: of `cohorts_of`."""
    asks = {"plan": plan, "stage": cohort.stage, "n_episodes": len(cohort.planned), "n_seats": n_seats}
    return Unit(key, KIND, asks, tuple(needs), LIMIT_S, position=cohort.first)


def rollout_key(cohort: Ask, number: int) -> str:
    """The key of the unit of a cohort. number: of those units of the cohort that were done before."""
    key = stable_id(*_names(cohort))
    return f"{key}-{number}" if number else key


def plan_hash(ask: Ask) -> str:
    """Hash of an ask: its stage, its actor, and its episodes in their order."""
    return stable_id(*_names(ask))


def _names(ask: Ask) -> list[object]:
    return [KIND, ask.stage, ask.actor.identity.hash, ask.is_judged, *(episode.id for _, episode in ask.planned)]


class RolloutDoer:
    """See `worker.Doer`. For one event loop."""

    def __init__(
        self,
        pool: Pool,
        resolve: Resolve,
        *,
        guess: Rule | None = None,
        canaries: bool = True,
        pauses_s: Sequence[float] | None = None,
    ) -> None:
        """guess, canaries, pauses_s: of `LocalWork`."""
        self._pool = pool
        self._resolve = resolve
        self._work = LocalWork(
            pool, guess=guess, canaries=canaries, max_concurrent=None, probes=False, pauses_s=pauses_s
        )
        self._batches = asyncio.Lock()
        """Held by a cohort of a policy that answers in batches: two of them would wait for each other's sandboxes."""

    async def do(self, claimed: Claimed) -> Effect:
        """See `worker.Doer`. Raises CapabilityError, and PluginError and ConfigError for a mistake in a task."""
        cohort = self._resolve(claimed)
        turn: AbstractAsyncContextManager[object] = nullcontext()
        if isinstance(cohort.actor.policy, BatchPolicy):
            self._refuse_smaller_batches(claimed.unit)
            turn = self._batches
        async with turn:
            attempts = await self._work.all(cohort)
        placed = (Placed(cohort.stage, cohort.first + n, one, cohort.anew) for n, one in enumerate(attempts))
        return Effect(result={"attempts": _facts(attempts)}, attempts=tuple(placed))

    def _refuse_smaller_batches(self, unit: Unit) -> None:
        n_seats = unit.asks["n_seats"]
        if self._pool.max_sandboxes != n_seats:
            raise CapabilityError(
                f"unit {unit.key} was planned in batches of {n_seats}, and this worker has room for "
                f"{self._pool.max_sandboxes} sandboxes; other batches would give other answers"
            )


def _facts(attempts: Iterable[Attempt]) -> dict[str, list[Any]]:
    """Facts about attempts that are not in the store, by episode."""
    return {one.episode.id: [one.judge_s, one.lost_usd] for one in attempts}


def with_facts(attempt: Attempt, result: dict[str, Any]) -> Attempt:
    """A stored attempt with the facts about it, from the result of its unit."""
    judge_s, lost_usd = result.get("attempts", {}).get(attempt.episode.id, (0.0, 0.0))
    return attempt.model_copy(update={"judge_s": judge_s, "lost_usd": lost_usd})
