"""Which failure decided the outcome: the first that was not recovered from.

Recovery is looked for, not assumed: a failing call that a later call made good did not lose the
episode, whatever it looked like. Infrastructure is the cause only when nothing failed before it, and
never of a run of ours that has a reward. An error with which the agent ended its own run always is: it alone
made the reward 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from agentloop.failures.detectors.budget import slow_call
from agentloop.failures.detectors.call import wrong_command
from agentloop.failures.detectors.rules import Rule, rules_on
from agentloop.failures.detectors.signs import OF_A_STEP, SIGNS
from agentloop.failures.evidence import last_words
from agentloop.failures.reading import Reading
from agentloop.failures.reference import expected_actions
from agentloop.failures.taxonomy import precedence
from agentloop.faults import fault_in
from agentloop.types import Failure, FailureType, RewardState, Score, SubTrace, Task, ToolCall, Trace

_OF_A_CALL = frozenset(
    {
        FailureType.budget_context_overflow,
        FailureType.call_malformed,
        FailureType.call_unknown_tool,
        FailureType.call_wrong_arguments,
        FailureType.infra_tool_timeout,
        FailureType.agent_crashed,
        FailureType.infra_model_api_error,
        FailureType.infra_sandbox_failure,
    }
)
"""Types that a later call can make good; nothing makes good what ended the episode."""
_NEVER_MENDED = (f"{wrong_command.id.partition('@')[0]}@", "rules.expected.")
"""How detectors' names begin of calls that succeeded and were the wrong ones; later calls do not mend them."""
_BY_ANY_CALL = frozenset({FailureType.call_malformed, FailureType.call_unknown_tool})
"""What a success with another tool makes good, too: there was no such call to make again."""
_CONSEQUENCES = frozenset(
    {
        FailureType.budget_limit_reached,
        FailureType.outcome_premature_stop,
        FailureType.outcome_wrong_or_unverified,
        FailureType.outcome_unsafe_action,
        FailureType.outcome_reward_hack,
    }
)
"""How a run ended rather than why: an earlier step may have decided it."""
MAX_DEPTH = 8
"""Sub-agents of sub-agents that are looked into."""


def classify(
    task: Task,
    trace: Trace,
    state: RewardState,
    reward: float | None = None,
    scores: Sequence[Score] = (),
    *,
    rules: Sequence[Rule] | None = None,
    guess: Rule | None = None,
) -> tuple[Failure, ...]:
    """Every failure of a trace, causes before consequences, the critical one marked.

    Exactly one is critical when the trace failed (reward below 1), broke (`infra_failed`) or could
    not be graded (a score with an error); none for a success, and none where nobody knows.
    `unclassified` stands in when the rules found nothing that was left unrecovered.
    rules: every detector that is on by default.
    guess: called for a run that lost where the rules do not explain it: they found no unrecovered failure, or only
    a bad outcome. Its first failure is critical (`learned.Scorer.guess`).
    """
    return label(Reading(task, trace, reward, scores, expected=expected_actions(task)), state, rules=rules, guess=guess)


def label(
    reading: Reading, state: RewardState, *, rules: Sequence[Rule] | None = None, guess: Rule | None = None
) -> tuple[Failure, ...]:
    """As `classify`, for a trace that was read already."""
    if rules is None:
        rules = rules_on()
    failures = [failure for rule in rules for failure in rule(reading)]
    for child in reading.trace.children:
        failures += _below(reading, child, rules, 1)
    if len(failures) > 1:
        failures.sort(key=_order)
    if not (reading.lost or state is RewardState.infra_failed or any(score.error for score in reading.scores)):
        return tuple(failures)
    after = _After(reading)
    fault = None
    if not reading.foreign:
        fault = fault_in(reading.trace)
    # Infrastructure did not decide a run of ours that has a reward.
    spared = state is RewardState.scored and not reading.foreign and not (fault and fault.ours)
    causes = (i for i, f in enumerate(failures) if not (spared and f.type.is_infra) and not after.recovered(f))
    position = next(causes, len(failures))
    if fault and not fault.ours:
        ended = (i for i, failure in enumerate(failures) if failure.step is None and failure.type is fault.type)
        position = next(ended, position)
        if position < len(failures):
            return _marked(failures, position)
    cause = next(iter(failures[position:]), None)
    if reading.lost and (leads := _leads(reading, cause, guess)):
        failures = [*leads, *failures]
        position = 0
    if position == len(failures):
        failures.append(_unclassified(reading.trace))
    return _marked(failures, position)


def _marked(failures: Sequence[Failure], position: int) -> tuple[Failure, ...]:
    """`failures`, with the one at `position` critical."""
    critical = failures[position].model_copy(update={"critical": True})
    return (*failures[:position], critical, *failures[position + 1 :])


def _leads(reading: Reading, cause: Failure | None, guess: Rule | None) -> list[Failure]:
    """Failures that may explain a run that lost, where the rules have no more than `cause`; the critical one first.

    A guess ranks above a sign and above a rule's candidate, because it was measured on labelled runs. A guess with a
    step and no type stays `unclassified`: a sign at its step is listed beside it, because no label measured how often
    such a sign is right.
    """
    says_nothing = cause is None or cause.type is FailureType.outcome_wrong_or_unverified
    is_open = cause is None or cause.confidence < 1.0 or cause.type in _CONSEQUENCES
    guessed = []
    if is_open and guess is not None:
        guessed = guess(reading)
    signs = (failure for sign in SIGNS if reading.by_words for failure in sign(reading))
    if not guessed or guessed[0].type is not FailureType.unclassified:
        return [*guessed, *islice(signs, int(says_nothing))]
    leads = []
    if cause is not None and not says_nothing:
        leads.append(cause)
    all_signs = [*signs]
    leads += [*all_signs, *(failure for sign in OF_A_STEP if reading.by_words for failure in sign(reading))]
    same = next((failure for failure in leads if failure.step == guessed[0].step), None)
    if same is None:
        return [*guessed, *all_signs[: int(says_nothing)]]
    if same is cause:
        return [*guessed]
    return [*guessed, same]


def _below(reading: Reading, child: SubTrace, rules: Sequence[Rule], depth: int) -> list[Failure]:
    """The failures that a sub-agent did not recover from, at the step of its parent that called it."""
    # Only the whole run's outcome is known; errors of a sub-agent did no harm to a success.
    below = Reading(reading.task, child.trace, 1.0 if reading.won else None)
    failures = [failure for rule in rules for failure in rule(below)]
    if depth < MAX_DEPTH:
        for grandchild in child.trace.children:
            failures += _below(below, grandchild, rules, depth + 1)
    after = _After(below)
    indexes = {step.index for step in reading.trace.steps}
    step = next((index for index in indexes if index == child.step), None)
    return [
        failure.model_copy(update={"step": step})
        for failure in failures
        if failure.type is not FailureType.outcome_premature_stop and not after.recovered(failure)
    ]


class _After:
    """What happened after each step, looked up once for all failures of a trace."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self._last_success: dict[str, int] = {}
        self._failed: dict[int, list[ToolCall]] = {}
        self._names: dict[int, set[str]] = {}
        self._last_any = -1
        self._first_seen: dict[tuple[str, str], int] = {}
        self._last_new = -1
        self._from_good_call, self._answered_by_error = _sources(reading)
        for act in reading.acts:
            if act.ok:
                self._last_any = act.step
                self._last_success[act.name] = act.step
            elif act.call is not None:
                self._failed.setdefault(act.step, []).append(act.call)
            if act.failed:
                self._names.setdefault(act.step, set()).add(act.name)
            if act.call is not None:
                first = self._first_seen.setdefault((act.call.name, act.call.arguments), act.step)
                if act.ok and first == act.step:
                    self._last_new = act.step

    def recovered(self, failure: Failure) -> bool:
        """True when what the agent did afterwards made `failure` harmless.

        A call that failed is recovered by a success of the same tool in a later step (a success beside it is
        luck: the policy had not seen the failure), or by a submission that never needed it. It is not when its
        output was submitted. A repetition is recovered by doing something else that works.
        """
        if failure.step is None or failure.detector.startswith(_NEVER_MENDED):
            return False
        if failure.type is FailureType.plan_repetition:
            return self.reading.submitted or self._last_new > failure.step
        if failure.type not in _OF_A_CALL and failure.detector != slow_call.id:
            return False
        mended = self._called_again(failure) or self._submitted_without(failure.step)
        return mended and (self._from_good_call or failure.step not in self._answered_by_error)

    def _called_again(self, failure: Failure) -> bool:
        step = failure.step
        if step is None:
            return False
        names = self._names.get(step, set())
        if not self.reading.by_words or failure.type in _BY_ANY_CALL or not names:
            return self._last_any > step
        return all(self._last_success.get(name, -1) > step for name in names)

    def _submitted_without(self, step: int) -> bool:
        """True when the submission did not need the call that failed.

        Either the answer was read from a call that succeeded, or the call that failed was itself a
        submission, made properly in a later step.
        """
        if not self.reading.submitted or self.reading.last_step is None:
            return False
        failed = self._failed.get(step, [])
        resubmitted = self.reading.last_step > step and bool(failed) and all(map(_meant_to_submit, failed))
        return resubmitted or self._from_good_call


def _order(failure: Failure) -> tuple[float, int]:
    """First by step; a failure without one came after the last recorded step."""
    step = math.inf
    if failure.step is not None:
        step = failure.step
    return step, precedence(failure.type)


def _sources(reading: Reading) -> tuple[bool, set[int]]:
    """(a successful call printed the answer and nothing else; steps of failing calls that have it as a line)."""
    answer = reading.answer
    good = False
    errors = set[int]()
    if answer:
        for step, _, result in reading.calls:
            if result is not None and answer in result.content:
                good |= result.ok and result.content.strip() == answer
                if not result.ok and answer in map(str.strip, result.content.splitlines()):
                    errors.add(step)
    return good, errors


def _meant_to_submit(call: ToolCall) -> bool:
    return call.name == "submit" or '"submit"' in call.arguments


def _unclassified(trace: Trace) -> Failure:
    return Failure(
        type=FailureType.unclassified, step=None, evidence=last_words(trace), detector="rules.unclassified@1"
    )
