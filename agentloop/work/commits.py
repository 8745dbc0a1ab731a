"""Attempts of one stage on disk: those that are there already, and new ones in transactions that several share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from agentloop.rollout.actors import Actor
from agentloop.rollout.plan import Planned
from agentloop.rollout.refusals import is_mistaken
from agentloop.rollout.retry import is_lost
from agentloop.store.bodies import unpack
from agentloop.store.store import Store
from agentloop.types import Attempt, Episode, EpisodeState, RewardState, Task

WAIT_S = 0.1
"""How long an attempt that ended waits for others, to share their transaction. The last one waits for nobody."""

Waiting = tuple[int, Attempt, asyncio.Future[None]]
"""(position in the stage, an attempt that is not on disk yet, what `put` waits for)."""


class Commits:
    """New attempts of one stage. An attempt is on disk when `put` returns."""

    def __init__(self, store: Store | None, stage: str, n_planned: int) -> None:
        """store: None keeps nothing. n_planned: how many attempts are to come."""
        self._store, self._stage, self._n_left = store, stage, n_planned
        self._waiting: list[Waiting] = []

    async def put(self, position: int, attempt: Attempt) -> None:
        """Store `attempt` at `position` of the stage. Raises StoreError."""
        if self._store is None:
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.call_later(WAIT_S, self.flush)
        self._waiting.append((position, attempt, future))
        if len(self._waiting) == self._n_left:
            self.flush()
        await future

    def flush(self) -> None:
        """Store whatever waits, in one transaction."""
        waiting, self._waiting = self._waiting, []
        self._n_left -= len(waiting)
        if not waiting or self._store is None:
            return
        try:
            positions, attempts = [position for position, *_ in waiting], [attempt for _, attempt, _ in waiting]
            self._store.put_attempts(self._stage, attempts, positions=positions)
        except BaseException as error:  # each that waits for the transaction gets its error
            failure = error
            _settle(waiting, lambda future: future.set_exception(failure))
        else:
            _settle(waiting, lambda future: future.set_result(None))


def read_attempts(store: Store, planned: Sequence[Planned]) -> dict[str, Attempt]:
    """Episode id -> its attempt, of those of `planned` that are on disk."""
    rows = store.attempts([episode.id for _, episode in planned])
    attempts: dict[str, Attempt] = {}
    for task, episode in planned:
        if (row := rows.get(episode.id)) is not None:
            trace, verdict = unpack(row.body)
            ended = episode.model_copy(update={"state": EpisodeState(row.episode_state or EpisodeState.finished)})
            attempts[episode.id] = Attempt(task=task, episode=ended, trace=trace, verdict=verdict)
    return attempts


def is_usable(attempt: Attempt, identity: str | None) -> bool:
    """False for a stored attempt that has to be made again.

    These are attempts of another version than `identity`, those that infrastructure or a mistake in the settings ended,
    and those without a reward, unless a person or a later outcome may give them one.
    """
    verdict = attempt.verdict
    has_worth = verdict.state in (RewardState.scored, RewardState.disputed) or any(s.waiting for s in verdict.scores)
    is_same = attempt.trace.identity == identity
    return is_same and has_worth and not is_lost(attempt.episode) and not is_mistaken(attempt.trace)


def usable_attempt(store: Store, task: Task, episode: Episode, actor: Actor) -> Attempt | None:
    """The attempt at one episode that is on disk and can be used."""
    attempt = read_attempts(store, [(task, episode)]).get(episode.id)
    return attempt if attempt is not None and is_usable(attempt, actor.identity.hash or None) else None


def _settle(waiting: Sequence[Waiting], end: Callable[[asyncio.Future[None]], None]) -> None:
    for _, _, future in waiting:
        if not future.done():
            end(future)
