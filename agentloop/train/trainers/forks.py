"""Dead tasks -> groups of attempts that go on from the last good step of one that failed.

From there success is nearer: a group whose rewards differ carries a gradient again. Its mean gives the failed attempt's
own steps advantages, so that the step that lost the reward carries the blame (`data/step_credit.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from agentloop.abilities import Forks
from agentloop.errors import PolicyError, SandboxError
from agentloop.protocols import Experience, Policy
from agentloop.train.algorithms.advantages import spread_of
from agentloop.train.curriculum import Curriculum
from agentloop.train.data.row import Row
from agentloop.train.data.step_credit import continuations, with_step_credit
from agentloop.train.trainers.groups import Group
from agentloop.types import Attempt, Task

MAX_FORKED = 2
"""Dead tasks of one round that are forked: each costs a group of attempts."""
N_TRIED = 2
"""Attempts of a group whose state is tried to be made again."""


class Forked(NamedTuple):
    """Attempts that go on from a step of another."""

    origin: Attempt
    """Failed; its group failed whole."""
    group: Group

    @property
    def has_spread(self) -> bool:
        """Whether some of them passed and some did not, so that they carry a gradient."""
        rewards = {attempt.verdict.reward for attempt in self.group.attempts} - {None}
        return len(rewards) > 1

    def credited(self, rows: Sequence[Row], *, is_scaled: bool) -> list[Row]:
        """`rows`, those of the origin with advantages by step; the others as they are.

        is_scaled: these are divided by the spread of the rewards of the origin and of its forks, because those of its
        own group are equal.
        """
        rewards = {0: [0.0], **continuations(self.group.attempts)}
        own = [row for row in rows if row.trajectory == self.origin.trace.id]
        if not own or not any(map(any, rewards.values())):
            return list(rows)
        together = [own[0].reward or 0.0, *(reward for step, each in rewards.items() if step for reward in each)]
        unit = spread_of(together) if is_scaled and len(together) > 1 else 1.0
        credited = iter(with_step_credit(own, self.origin.trace, rewards, unit))
        return [next(credited) if row.trajectory == self.origin.trace.id else row for row in rows]


async def forked(
    experience: Experience, taken: Sequence[Group], curriculum: Curriculum, policy: Policy, step: int
) -> list[Forked]:
    """Of the first dead tasks of the round `step`; none of experience that cannot fork.

    curriculum: as it was before the round. A fork that infrastructure lost is none.
    """
    if not isinstance(experience, Forks):
        return []
    dead: dict[str, Group] = {}
    for group in taken:
        if _failed(group) and curriculum.is_dead(group.attempts[0].task):
            dead.setdefault(group.attempts[0].task.id, group)
    made: list[Forked] = []
    for group in list(dead.values())[:MAX_FORKED]:
        start = await _start(experience, group)
        if start is None:
            continue
        origin, task = start
        part = f"fork/{step}/{group.number}"
        try:
            attempts = await experience.attempts(
                [task], policy=policy, part=part, group_size=len(group.attempts), are_forks=True
            )
        except (PolicyError, SandboxError):  # the round itself is there, and a server that is gone shows in the next
            continue
        made.append(Forked(origin, Group(group.number, 0, attempts)))
    return made


def last_good_step(attempt: Attempt) -> int:
    """The step that lost the reward is the one that the verdict names, else the last; attempts go on before it."""
    critical = attempt.verdict.critical
    if critical is not None and critical.step is not None:
        return critical.step
    return len(attempt.trace.steps) - 1


async def _start(experience: Forks, group: Group) -> tuple[Attempt, Task] | None:
    """(failed attempt, its task before the step that lost the reward): the one that got furthest, if it can be had."""
    by_step = Counter({n: last_good_step(attempt) for n, attempt in enumerate(group.attempts)})
    for n, step in by_step.most_common(N_TRIED):
        task = await experience.fork(group.attempts[n], step) if step > 0 else None
        if task is not None:
            return group.attempts[n], task
    return None


def _failed(group: Group) -> bool:
    rewards = [attempt.verdict.reward for attempt in group.attempts if attempt.verdict.reward is not None]
    return bool(rewards) and max(rewards) <= 0.0
