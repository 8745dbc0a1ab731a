"""Which failure decided the outcome: the first that was not recovered from.

Recovery is looked for, not assumed: a failing call that a later call made good did not lose the
episode, whatever it looked like. Infrastructure is the cause only when nothing failed before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentloop.judge.failures.evidence import last_words
from agentloop.judge.failures.rules import RULES, WRONG_COMMAND, Reading, Rule
from agentloop.judge.failures.taxonomy import precedence
from agentloop.types import Failure, FailureType, RewardState, Score, Task, ToolCall, Trace

_OF_A_CALL = frozenset(
    {
        FailureType.budget_context_overflow,
        FailureType.call_malformed,
        FailureType.call_unknown_tool,
        FailureType.call_wrong_arguments,
        FailureType.infra_tool_timeout,
    }
)
"""Types that a later call can make good; nothing makes good what ended the episode."""


def classify(
    task: Task,
    trace: Trace,
    state: RewardState,
    reward: float | None = None,
    scores: Sequence[Score] = (),
    *,
    rules: Sequence[Rule] = RULES,
) -> tuple[Failure, ...]:
    """Every failure of a trace, causes before consequences, the critical one marked.

    Exactly one is critical when the trace failed (reward below 1), broke (`infra_failed`) or could
    not be graded (a score with an error); none for a success, and none where nobody knows.
    `unclassified` stands in when the rules found nothing that was left unrecovered.
    """
    reading = Reading(task, trace, reward, scores)
    found = [failure for rule in rules for failure in rule(reading)]
    if len(found) > 1:
        found.sort(key=_order)
    if not (reading.lost or state is RewardState.infra_failed or any(score.error for score in scores)):
        return tuple(found)
    position = next((i for i, failure in enumerate(found) if not recovered(reading, failure)), len(found))
    if position == len(found):
        found.append(_unclassified(trace))
    found[position] = found[position].model_copy(update={"critical": True})
    return tuple(found)


def recovered(reading: Reading, failure: Failure) -> bool:
    """True when what the agent did afterwards made `failure` harmless.

    A call that failed is recovered by a success in a later step (a success beside it is luck: the
    policy had not seen the failure), or by a submission that never needed it. It is not when its
    output was submitted. A repetition is recovered by doing something else that works.
    """
    if failure.step is None or failure.detector == WRONG_COMMAND:
        return False
    if failure.type is FailureType.plan_repetition:
        return _moved_on(reading, failure.step)
    if failure.type not in _OF_A_CALL:
        return False
    return not _reached_answer(reading, failure.step) and (
        any(result is not None and result.ok for index, _, result in reading.calls if index > failure.step)
        or _submitted_without(reading, failure.step)
    )


def _order(failure: Failure) -> tuple[float, int]:
    """First by step; what has none broke after the last step that was recorded."""
    return (math.inf if failure.step is None else failure.step, precedence(failure.type))


def _reached_answer(reading: Reading, step: int) -> bool:
    """True when the answer is a line that a failing call of `step` printed and no good call repeated."""
    if not reading.answer:
        return False
    at_fault = any(
        reading.answer in map(str.strip, result.content.splitlines())
        for index, _, result in reading.calls
        if index == step and result is not None and not result.ok
    )
    return at_fault and not _from_good_call(reading)


def _from_good_call(reading: Reading) -> bool:
    """True when a successful call printed the answer and nothing else."""
    return bool(reading.answer) and any(
        result is not None and result.ok and result.content.strip() == reading.answer for _, _, result in reading.calls
    )


def _submitted_without(reading: Reading, step: int) -> bool:
    """True when the submission did not need the call that failed.

    Either the answer was read from a call that succeeded, or the call that failed was itself a
    submission, made properly in a later step.
    """
    if not reading.submitted or reading.last_step is None:
        return False
    failed = [call for index, call, result in reading.calls if index == step and not (result and result.ok)]
    resubmitted = reading.last_step > step and bool(failed) and all(map(_meant_to_submit, failed))
    return resubmitted or _from_good_call(reading)


def _meant_to_submit(call: ToolCall) -> bool:
    return call.name == "submit" or '"submit"' in call.arguments


def _moved_on(reading: Reading, step: int) -> bool:
    """True when an answer was submitted, or a call of a kind not seen before succeeded, after `step`."""
    if reading.submitted:
        return True
    seen = {(call.name, call.arguments) for index, call, _ in reading.calls if index <= step}
    return any(
        result is not None and result.ok and (call.name, call.arguments) not in seen
        for index, call, result in reading.calls
        if index > step
    )


def _unclassified(trace: Trace) -> Failure:
    return Failure(
        type=FailureType.unclassified, step=None, evidence=last_words(trace), detector="rules.unclassified@1"
    )
