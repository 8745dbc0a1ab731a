"""The contract of `protocols.Verifier`. Each law takes a verifier with a trace that is right and one that is wrong."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from agentloop.abilities import artifacts_of, is_paid, time_of, waits
from agentloop.errors import NotYet
from agentloop.judge.score import TIMEOUT_S, FreshBox, judge
from agentloop.protocols import Verifier
from agentloop.testing import expect
from agentloop.types import Message, StopReason, Task, Trace


@dataclass(frozen=True)
class VerifierCase:
    """A verifier, and what it should tell apart."""

    verifier: Verifier
    right: Trace
    wrong: Trace
    fresh: FreshBox | None = None
    """Makes the sandbox with the artifacts of the right trace, for a verifier that names some."""
    fresh_wrong: FreshBox | None = None
    """Makes the one of the wrong trace."""


VerifierLaw: TypeAlias = Callable[[VerifierCase], Awaitable[None]]
TASK = Task(id="contract", instruction="x")


def answered(answer: str | None) -> Trace:
    """A trace without steps that submitted `answer`."""
    stop = StopReason.no_tool_call if answer is None else StopReason.submitted
    return Trace(
        id="contract", messages=(Message(role="user", content="x"),), answer=answer, stop_reason=stop,
    )  # fmt: skip


async def _number(case: VerifierCase, trace: Trace) -> float:
    fresh = case.fresh_wrong if trace is case.wrong else case.fresh
    [score] = (await judge(TASK, trace, [case.verifier], fresh=fresh)).scores
    expect(score.value is not None, f"no number: {score.error}")
    return score.value if score.value is not None else math.nan


async def it_has_a_name_and_a_version(case: VerifierCase) -> None:
    """Every verdict records both."""
    name = case.verifier.name
    version = case.verifier.version
    expect(isinstance(name, str) and name, f"name is {name!r}, not a text")
    expect(isinstance(version, str) and version, f"version is {version!r}, not a text")


async def its_abilities_are_well_formed(case: VerifierCase) -> None:
    """Artifacts are absolute paths, a time is above 0."""
    artifacts = artifacts_of(case.verifier)
    time_s = time_of(case.verifier, TIMEOUT_S)
    expect(all(path.startswith("/") for path in artifacts), f"artifacts are absolute paths, not {artifacts}")
    expect(time_s > 0 and math.isfinite(time_s), f"timeout_s is {time_s}")


async def it_tells_right_from_wrong(case: VerifierCase) -> None:
    """Numbers in [0, 1], higher for what is right. One that waits raises NotYet instead."""
    if waits(case.verifier):
        try:
            number = await case.verifier.score(case.right, None)
        except NotYet:
            return
        raise AssertionError(f"it waits for a number from outside, and gave {number!r}")
    right = await _number(case, case.right)
    wrong = await _number(case, case.wrong)
    expect(right > wrong, f"the right trace has {right:g}, the wrong one {wrong:g}")


async def nothing_is_not_right(case: VerifierCase) -> None:
    """An agent that did nothing does not win."""
    if not waits(case.verifier) and case.fresh is None:
        nothing = await _number(case, answered(None))
        right = await _number(case, case.right)
        expect(nothing < right, f"an empty trace has {nothing:g}, the right one {right:g}")


async def the_same_trace_has_the_same_number(case: VerifierCase) -> None:
    """A verifier is shared and keeps no state; one that asks a model may vary."""
    if not waits(case.verifier) and not is_paid(case.verifier):
        numbers = {await _number(case, trace) for trace in (case.right, case.right)}
        await _number(case, case.wrong)
        numbers.add(await _number(case, case.right))
        expect(len(numbers) == 1, f"one trace has the numbers {sorted(numbers)}")


VERIFIER_LAWS: tuple[VerifierLaw, ...] = (
    it_has_a_name_and_a_version,
    its_abilities_are_well_formed,
    it_tells_right_from_wrong,
    nothing_is_not_right,
    the_same_trace_has_the_same_number,
)
