"""Attempts of a plan that are on disk already, and which of them count."""

from __future__ import annotations

from collections.abc import Sequence

from agentloop.rollout.actors import Actor
from agentloop.rollout.plan import Planned
from agentloop.rollout.refusals import is_mistaken
from agentloop.rollout.retry import is_lost
from agentloop.store.bodies import unpack
from agentloop.store.store import Store
from agentloop.types import Attempt, Episode, EpisodeState, RewardState, Task


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
