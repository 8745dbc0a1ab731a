"""Attempts made in this process, several at once.

Each attempt is on disk when it ends. What is on disk already is not made again: whoever asks again after the process
was killed gets the missing attempts alone. Two kinds of attempts are made again together. A policy that answers in
batches may answer differently in other company, so its cohorts are made again whole; and verifiers that compare the
attempts of a group need all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from agentloop.abilities import preflight
from agentloop.failures.detectors.rules import Rule
from agentloop.policies.lockstep import BatchPolicy, Lockstep
from agentloop.protocols import Agent, Pool
from agentloop.rollout.attempt import Crew, Rollout
from agentloop.rollout.plan import Planned
from agentloop.rollout.refusals import MAX_INFRA_SHARE, is_mistaken
from agentloop.rollout.retry import is_lost, is_worth_repeating, repeated
from agentloop.store.commits import AttemptCommits
from agentloop.store.store import Store
from agentloop.types import Attempt
from agentloop.work.judging import Judging, compares_attempts
from agentloop.work.stored import is_usable, read_attempts, usable_attempt
from agentloop.work.work import Ask

T = TypeVar("T")


class LocalWork:
    """See `work.Work`."""

    def __init__(
        self,
        pool: Pool,
        store: Store | None = None,
        *,
        guess: Rule | None = None,
        canaries: bool = True,
        max_concurrent: int = 8,
        probes: bool = True,
        pauses_s: Sequence[float] | None = None,
    ) -> None:
        """store: None keeps nothing. guess, canaries: of `Crew`.

        max_concurrent: attempts at once over all asks, for a policy that does not answer in batches. probes: make a few
        attempts before the others, until one has ended by itself, in this process or on disk. pauses_s: of
        `retry.repeated`.
        """
        self._pool = pool
        self._store = store
        self._guess = guess
        self._canaries = canaries
        self._max_concurrent = max_concurrent
        self._pauses_s = pauses_s
        self._answers = not probes
        """Whether the policy is taken to answer."""
        self._checked: list[Agent] = []
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def all(self, ask: Ask) -> list[Attempt]:
        """See `work.Work`."""
        done = {attempt.episode.id: attempt async for attempt in self.each(ask)}
        return [done[episode.id] for _, episode in ask.planned if episode.id in done]

    async def each(self, ask: Ask) -> AsyncIterator[Attempt]:
        """See `work.Work`."""
        ended: asyncio.Queue[Attempt | None] = asyncio.Queue()
        work = asyncio.create_task(self._make(ask, ended.put_nowait))
        work.add_done_callback(lambda _: ended.put_nowait(None))
        try:
            while (attempt := await ended.get()) is not None:
                yield attempt
            await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _make(self, ask: Ask, on_end: Callable[[Attempt], None]) -> None:
        done = self._continued(ask)
        missing = [(task, episode) for task, episode in ask.planned if episode.id not in done]
        if missing:
            await self._check(ask.actor.agent)
        crew = Crew(ask.actor, self._pool, self._guess, self._canaries)
        commits = AttemptCommits(self._store) if self._store is not None else None
        with TemporaryDirectory(prefix="agentloop-") as folder:
            judging = Judging(ask, crew, commits, Path(folder), on_end, partial(self._stored, ask))
            try:
                for attempt in done.values():
                    on_end(attempt)
                if isinstance(ask.actor.policy, BatchPolicy):
                    for cohort in self._cohorts(ask, missing):
                        await self._in_lockstep(judging, cohort, ask.actor.policy)
                elif done or await self._probe(judging, missing):  # an attempt that can be used shows that it answers
                    await self._one_by_one(judging, missing)
                await judging.end_rest()
            finally:
                if commits is not None:
                    commits.close()

    async def _check(self, agent: Agent) -> None:
        """Ask each agent once whether it can act. Raises ConfigError."""
        if not any(one is agent for one in self._checked):
            await preflight(agent)
            self._checked.append(agent)

    def _continued(self, ask: Ask) -> dict[str, Attempt]:
        """Attempts of `ask` that are on disk and can be used; those that are made again are superseded."""
        if self._store is None:
            return {}
        attempts = read_attempts(self._store, ask.planned)
        identity = ask.actor.identity.hash or None
        usable = {name for name, attempt in attempts.items() if is_usable(attempt, identity)}
        whole = [unit for unit in self._units(ask) if all(episode.id in usable for _, episode in unit)]
        whole_ids = {episode.id for unit in whole for _, episode in unit}
        if again := [name for name in attempts if name not in whole_ids]:
            self._store.supersede_attempts(again)
        return {name: attempt for name, attempt in attempts.items() if name in whole_ids}

    def _stored(self, ask: Ask, planned: Planned) -> Attempt | None:
        if self._store is None:
            return None
        return usable_attempt(self._store, *planned, ask.actor)

    def _units(self, ask: Ask) -> list[list[Planned]]:
        """Attempts that are made again together."""
        groups = [list(group) for _, group in groupby(ask.planned, key=lambda one: one[1].group)]
        compared = [compares_attempts(group[0][0]) for group in groups]
        if isinstance(ask.actor.policy, BatchPolicy):
            return [list(ask.planned)] if any(compared) else self._cohorts(ask, ask.planned)
        units: list[list[Planned]] = []
        for group, is_compared in zip(groups, compared, strict=True):
            units += [group] if is_compared else [[one] for one in group]
        return units

    # ------------------------------------------------------------------ a policy that answers one at a time

    async def _probe(self, judging: Judging, missing: list[Planned]) -> bool:
        """Make the first attempts of `missing` and take them out; False where these show that nothing answers.

        The probe is the first episode. Where a mistake in the settings seems to have ended it, two episodes of other
        tasks join it, because an endpoint may refuse one task alone.
        """
        if self._answers or not missing:
            return True
        rollouts = [await self._one(judging, missing.pop(0))]
        if is_mistaken(rollouts[0].trace):
            others = [one for one in missing if one[0].id != rollouts[0].task.id][:2]
            rollouts += await together(self._one(judging, one) for one in others)
            missing[:] = [one for one in missing if one not in others]
        n_mistaken = sum(is_mistaken(rollout.trace) for rollout in rollouts)
        n_lost = sum(is_lost(rollout.episode) for rollout in rollouts)
        self._answers = max(n_mistaken, n_lost) <= MAX_INFRA_SHARE * len(rollouts)
        return self._answers

    async def _one_by_one(self, judging: Judging, missing: Iterable[Planned]) -> None:
        await together(self._one(judging, one) for one in missing)

    def _slot(self) -> asyncio.Semaphore:
        """Of `max_concurrent`, shared by every ask that is under way in this event loop."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._max_concurrent))
        return self._slots[1]

    async def _one(self, judging: Judging, planned: Planned) -> Rollout | Attempt:
        async def once() -> Rollout | Attempt:
            async with self._slot():
                return judging.end_stored(planned) or await judging.roll_out(planned)

        *lost, rollout = await repeated(once, lambda one: is_worth_repeating(one.episode, one.trace), self._pauses_s)
        if isinstance(rollout, Rollout):
            await judging.end(rollout, n_lost=len(lost))
        return rollout

    # ------------------------------------------------------------------ a policy that answers in batches

    def _cohorts(self, ask: Ask, planned: Sequence[Planned]) -> list[list[Planned]]:
        """Parts of `planned` whose attempts share batches.

        A batched policy answers when every seat has asked, so no more episodes sit down at once than can have a
        sandbox: one that waited for a sandbox would keep those that hold the sandboxes waiting.
        """
        is_shared = all(task.sandbox.read_only for task, _ in ask.planned)
        size = max(1, len(ask.planned)) if is_shared else self._pool.max_sandboxes
        return [list(planned[start : start + size]) for start in range(0, len(planned), size)]

    async def _in_lockstep(self, judging: Judging, cohort: Sequence[Planned], policy: BatchPolicy) -> None:
        todo = list(cohort)
        n_tries = 0

        async def once() -> list[Rollout]:
            """Attempts at `todo`; those that were lost."""
            nonlocal todo, n_tries
            lockstep = Lockstep(policy, len(todo))
            lost = dict[str, Rollout]()

            async def one(index: int, planned: Planned) -> None:
                seat = lockstep.seat(index)
                try:
                    rollout = await judging.roll_out(planned, seat)
                finally:
                    seat.leave()
                if is_worth_repeating(rollout.episode, rollout.trace):
                    lost[rollout.episode.id] = rollout
                else:
                    await judging.end(rollout, n_lost=n_tries)

            await together(one(index, planned) for index, planned in enumerate(todo))
            todo = [one for one in todo if one[1].id in lost]
            n_tries += 1
            return list(lost.values())

        *_, lost = await repeated(once, bool, self._pauses_s)
        for rollout in lost:
            await judging.end(rollout, n_lost=n_tries - 1)


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; when one raises, the others are cancelled and the first error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one) for one in work]
    except BaseExceptionGroup as several:  # the first is the one to mend; the others are often the same
        raise several.exceptions[0] from None
    return [done.result() for done in running]
