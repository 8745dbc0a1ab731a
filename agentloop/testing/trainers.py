"""The contract of `protocols.ProjectTrainer`. Each law takes what makes the trainer of a project, and its versions.

The project is new, and its first version may be made. A trainer that is made again goes on, as after a restart.
"""

from __future__ import annotations

import string
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from agentloop.protocols import ProjectTrainer
from agentloop.testing import expect
from agentloop.types import PolicyState, PolicyVersion

MakeTrainer: TypeAlias = Callable[[], ProjectTrainer]
Versions: TypeAlias = Callable[[], Sequence[PolicyVersion]]
"""Those that are registered, such as `project.registry.all`."""
TrainerLaw: TypeAlias = Callable[[MakeTrainer, Versions], Awaitable[None]]
HASH_DIGITS = 64


async def its_first_version_is_registered_and_live(make: MakeTrainer, versions: Versions) -> None:
    """Version 1, known by a hash of its contents."""
    first = await make().first()
    expect(list(versions()) == [first], f"first() gave {first!r}, and registered are {list(versions())!r}")
    expect(first.number == 1, f"the first version has the number {first.number}")
    expect(first.parent is None, f"the first version has the parent {first.parent}")
    expect(first.state is PolicyState.live, f"the first version is {first.state}, not live")
    is_hash = len(first.sha256) == HASH_DIGITS and set(first.sha256) <= set(string.hexdigits)
    expect(is_hash, f"sha256 is {first.sha256!r}, not {HASH_DIGITS} hexadecimal digits")


async def what_it_made_acts_after_a_restart(make: MakeTrainer, versions: Versions) -> None:
    """The gate asks `policy(version)`, in the same process or in a later one."""
    trainer = make()
    first = await trainer.first()
    for one in (trainer, make()):
        policy = one.policy(first)
        expect(isinstance(policy.name, str) and policy.name, "its policy has no name")
        expect(callable(getattr(policy, "complete", None)), "its policy has no complete")


async def it_goes_on_after_a_restart(make: MakeTrainer, versions: Versions) -> None:
    """`next` gives a registered candidate after the newest version, or nothing; version 1 is not made again."""
    first = await make().first()
    candidate = await make().next(first)
    if candidate is None:
        expect(list(versions()) == [first], "next() gave nothing, and registered a version")
        return
    expect(candidate.number == first.number + 1, f"the version after v1 is v{candidate.number}")
    expect(candidate.parent == first.number, f"the parent of v{candidate.number} is {candidate.parent}")
    expect(candidate.state is PolicyState.candidate, f"a new version is {candidate.state}; the gate decides on it")
    expect([one.number for one in versions()] == [1, 2], "next() registered another version than it gave")


TRAINER_LAWS: tuple[TrainerLaw, ...] = (
    its_first_version_is_registered_and_live,
    what_it_made_acts_after_a_restart,
    it_goes_on_after_a_restart,
)
