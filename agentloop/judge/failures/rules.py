"""Deterministic detectors: one small function per type or family, each quoting its evidence.

They say what happened, not which of it mattered: that is `critical.py`. A trace may carry several
failures, and a success may too. Nothing here reads a file, a clock or a model.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentloop.judge.failures.evidence import last_words, quote
from agentloop.judge.failures.reference import is_reference, prints_answer
from agentloop.types import (
    Failure,
    FailureType,
    Score,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    Trace,
)

WRONG_COMMAND = "rules.wrong_command@1"
"""The detector of a call that succeeded and was the wrong one; later calls do not mend it."""
N_EQUAL_CALLS = 3
LIKELY = 0.5
"""Confidence of a rule whose evidence fits other causes too; every other rule is certain (1.0)."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A trace with what is known of it; what every rule is given."""

    task: Task
    trace: Trace
    reward: float | None = None
    scores: Sequence[Score] = ()
    calls: Sequence[tuple[int, ToolCall, ToolResult | None]] = field(init=False)
    """`trace.tool_calls`, computed once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", self.trace.tool_calls)

    @property
    def lost(self) -> bool:
        """Known to have failed: rules about the outcome wait for this and never guess."""
        return self.reward is not None and self.reward < 1.0

    @property
    def won(self) -> bool:
        """Known to have succeeded."""
        return self.reward is not None and self.reward >= 1.0

    @property
    def submitted(self) -> bool:
        """True when the agent ended the episode with an answer, even an empty one."""
        return self.trace.stop_reason is StopReason.submitted or self.trace.answer is not None

    @property
    def answer(self) -> str:
        """The submitted answer without outer whitespace; "" when there is none."""
        return (self.trace.answer or "").strip()

    @property
    def last_step(self) -> int | None:
        """Index of the step with which the trace ends; None for a trace without steps."""
        return self.trace.steps[-1].index if self.trace.steps else None

    def failure(
        self, kind: FailureType, step: int | None, detector: str, *texts: str | None, confidence: float = 1.0
    ) -> Failure:
        """A failure that quotes the first of `texts` which says something, else the agent's last words."""
        evidence = quote(*texts) or last_words(self.trace)
        return Failure(type=kind, step=step, evidence=evidence, detector=detector, confidence=confidence)


Rule = Callable[[Reading], list[Failure]]


# ---------------------------------------------------------------------------------- infra, budget


def infrastructure(reading: Reading) -> list[Failure]:
    """What broke outside the agent, from the class name that leads `trace.error`.

    The step is None: a step during which the box or the model died was never recorded.
    """
    error, stopped = reading.trace.error, reading.trace.stop_reason is StopReason.error
    if error is None and not stopped:
        return []
    cause = (error or "").partition(":")[0]
    kind = FailureType.infra_model_api_error if cause == "PolicyError" else FailureType.infra_sandbox_failure
    known = cause in {"PolicyError", "SandboxError", "SandboxUnavailable", "CapabilityError", "SandboxGone"}
    return [reading.failure(kind, None, "rules.infrastructure@1", error, confidence=1.0 if known else LIKELY)]


def grader_failure(reading: Reading) -> list[Failure]:
    """A verifier gave no usable number. Its own words are in `Score.error`; quoted is what it was given."""
    if not any(score.error for score in reading.scores):
        return []
    return [reading.failure(FailureType.infra_grader_failure, None, "rules.grader_failure@1", reading.trace.answer)]


def tool_timeout(reading: Reading) -> list[Failure]:
    """Every call that overran its limit, whoever is to blame; `failing_call` names the agent's own."""
    return [
        reading.failure(
            FailureType.infra_tool_timeout, index, "rules.tool_timeout@1", result.content, call.arguments, call.name
        )
        for index, call, result in reading.calls
        if result is not None and result.timed_out
    ]


def context_overflow(reading: Reading) -> list[Failure]:
    """The run hit the context window, or a turn hit its token limit before it had said a whole call."""
    kind, detector = FailureType.budget_context_overflow, "rules.context_overflow@1"
    found = [
        reading.failure(kind, step.index, detector, message.content, *(call.arguments for call in message.tool_calls))
        for step in reading.trace.steps
        for message in (step.completion.message,)
        if step.completion.finish_reason == "length" and all(call.error is not None for call in message.tool_calls)
    ]
    if reading.trace.stop_reason is StopReason.context_limit:
        found.append(reading.failure(kind, reading.last_step, detector))
    return found


def limit_reached(reading: Reading) -> list[Failure]:
    """A limit of steps, time or cost ended the run."""
    if reading.trace.stop_reason not in {StopReason.step_limit, StopReason.time_limit, StopReason.cost_limit}:
        return []
    return [reading.failure(FailureType.budget_limit_reached, reading.last_step, "rules.limit_reached@1")]


# ------------------------------------------------------------------------------------------ call


def malformed(reading: Reading) -> list[Failure]:
    """The policy's text could not be read as a call, or the tool refused its shape."""
    return [
        reading.failure(
            FailureType.call_malformed,
            index,
            "rules.malformed@1",
            call.arguments,
            result.content if result else None,
            call.error,
        )
        for index, call, result in reading.calls
        if call.error is not None or _refused(result, "malformed call")
    ]


def unknown_tool(reading: Reading) -> list[Failure]:
    """The agent answered that it has no such tool."""
    return [
        reading.failure(FailureType.call_unknown_tool, index, "rules.unknown_tool@1", result.content)
        for index, call, result in reading.calls
        if result is not None and call.error is None and _refused(result, "no tool ")
    ]


_NOT_FOUND = re.compile(
    r"no such file|not found|cannot (?:access|open|read|stat)|does not exist|invalid|usage:|unknown option"
    r"|unrecognized|syntax error|is a directory|not a directory",
    re.IGNORECASE,
)


def failing_call(reading: Reading) -> list[Failure]:
    """A call that was made and failed: wrong values, or not the tool for the goal.

    A command of the agent's own that overran its limit is among them, because whoever writes
    `sleep 999` chose it. Only a reference command that timed out is left to `tool_timeout`: there
    the box was too slow. Certain when the result says that something is missing or invalid.
    """
    return [
        reading.failure(
            FailureType.call_wrong_arguments,
            index,
            "rules.failing_call@1",
            result.content,
            call.arguments,
            call.name,
            confidence=1.0 if _NOT_FOUND.search(result.content) else LIKELY,
        )
        for index, call, result in reading.calls
        if result is not None
        and not ((result.ok and not result.timed_out) or call.error is not None or _refused(result))
        and not (result.timed_out and is_reference(reading.task, call))
    ]


def wrong_command(reading: Reading) -> list[Failure]:
    """The submitted answer is what a command printed that the reference solution does not have.

    Another command is no failure by itself: only when the answer came out of it, the verifiers did
    not accept that answer, no reference command printed the same, and the reference's own value
    was not the last that was seen (that is `misread`).
    """
    if not (reading.lost and reading.answer and reading.task.solution):
        return []
    sources = [(index, call) for index, call, result in reading.calls if _printed(result, reading.answer)]
    if not sources or _last_printed(reading) or any(is_reference(reading.task, call) for _, call in sources):
        return []
    index, call = sources[0]
    return [reading.failure(FailureType.call_wrong_arguments, index, WRONG_COMMAND, call.arguments)]


# ------------------------------------------------------------------------------------- plan, obs


def repetition(reading: Reading) -> list[Failure]:
    """Three or more equal calls with equal results, anywhere in the trace; the step is the third one's."""
    if len(reading.calls) < N_EQUAL_CALLS:
        return []
    made: Counter[tuple[str, str, str, bool]] = Counter()
    found: list[Failure] = []
    for index, call, result in reading.calls:
        if result is None:
            continue
        key = (call.name, _canonical(call.arguments), result.content, result.ok)
        made[key] += 1
        if made[key] == N_EQUAL_CALLS:
            texts = (call.arguments, result.content, call.name)
            found.append(reading.failure(FailureType.plan_repetition, index, "rules.repetition@1", *texts))
    return found


def misread(reading: Reading) -> list[Failure]:
    """The last successful call printed the reference's answer, and another value was submitted.

    A submission that holds the printed value among other words was read rightly; it is only wrong.
    """
    if not (reading.lost and reading.answer):
        return []
    value = _last_printed(reading)
    whole = r"(?<![\w.+-]){}(?!\w|\.\w)"  # -95 and 95.5 are other values than 95
    if not value or (value in reading.answer and re.search(whole.format(re.escape(value)), reading.answer)):
        return []
    return [reading.failure(FailureType.obs_misread, reading.last_step, "rules.misread@1", reading.trace.answer)]


# --------------------------------------------------------------------------------------- outcome


def premature_stop(reading: Reading) -> list[Failure]:
    """Ended without submitting, with an empty answer, or with one that no successful call led to.

    The last of these needs a reference solution, which shows that work was needed.
    """
    if reading.won:
        return []
    stopped = reading.trace.stop_reason is StopReason.no_tool_call
    empty = reading.submitted and not reading.answer
    guessed = (
        reading.lost
        and reading.submitted
        and bool(reading.task.solution)
        and not any(result and result.ok for _, _, result in reading.calls)
    )
    if not (stopped or empty or guessed):
        return []
    return [reading.failure(FailureType.outcome_premature_stop, reading.last_step, "rules.premature_stop@1")]


def wrong_answer(reading: Reading) -> list[Failure]:
    """Submitted, and the verifiers did not give it full marks."""
    if not (reading.lost and reading.submitted):
        return []
    kind = FailureType.outcome_wrong_or_unverified
    return [reading.failure(kind, reading.last_step, "rules.wrong_answer@1", reading.trace.answer)]


RULES: tuple[Rule, ...] = (
    context_overflow,
    malformed,
    unknown_tool,
    failing_call,
    wrong_command,
    tool_timeout,
    misread,
    repetition,
    premature_stop,
    limit_reached,
    wrong_answer,
    infrastructure,
    grader_failure,
)


# --------------------------------------------------------------------------------- what they share


def _last_printed(reading: Reading) -> str | None:
    """What the last successful call printed, when that call was the reference's last; else None."""
    for _, call, result in reversed(reading.calls):
        if result is not None and result.ok:
            return result.content.strip() if prints_answer(reading.task, call) else None
    return None


def _refused(result: ToolResult | None, why: str = "") -> bool:
    """True for a call that was not made. A command that merely prints `error: ...` has an exit code."""
    return (
        result is not None
        and not result.ok
        and result.exit_code is None
        and not result.timed_out
        and result.content.startswith(f"error: {why}")
    )


def _printed(result: ToolResult | None, answer: str) -> bool:
    """True when the call succeeded and what it printed is `answer` and nothing else."""
    return result is not None and result.ok and result.content.strip() == answer


def _canonical(arguments: str) -> str:
    """Equal for JSON texts that differ only in key order or spacing; other text stands for itself."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
