"""Detectors of the group `infra`: what broke outside the agent. It never reaches a gradient, so our own traces
are believed by their structure alone: an agent chooses what its commands print.
"""

from __future__ import annotations

from collections.abc import Iterator

from agentloop.judge.failures.detector import LIKELY, Found, detector
from agentloop.judge.failures.reading import Reading
from agentloop.judge.failures.words import API, BOX, CONTEXT
from agentloop.types import FailureType, StopReason

SAID = 0.8
"""Confidence of what a foreign tool's words tell, without a flag or a status."""
_OURS = {"PolicyError", "SandboxError", "SandboxUnavailable", "CapabilityError", "SandboxGone"}


@detector("infrastructure", FailureType.infra_sandbox_failure, FailureType.infra_model_api_error)
def infrastructure(reading: Reading) -> Iterator[Found]:
    """What ended the run, from the class name that leads `trace.error`, or from its words.

    The step is None: a step during which the box or the model died was never recorded.
    """
    error, stopped = reading.trace.error, reading.trace.stop_reason is StopReason.error
    if (error is None and not stopped) or reading.ended is not None:
        return
    cause = (error or "").partition(":")[0]
    kind, sure = FailureType.infra_sandbox_failure, cause in _OURS
    if cause == "PolicyError":
        kind = FailureType.infra_model_api_error
    elif not sure and error:
        if CONTEXT.search(error.lower()):  # which `context_overflow` tells
            return
        if API.search(error.lower()):
            kind, sure = FailureType.infra_model_api_error, True
        else:
            sure = bool(BOX.search(error.lower()))
    yield Found(None, (error,), 1.0 if sure else LIKELY, type=kind)


@detector("tool_timeout", FailureType.infra_tool_timeout)
def tool_timeout(reading: Reading) -> Iterator[Found]:
    """Every call that overran its limit, whoever is to blame; `failing_call` names the agent's own."""
    for index, call, result in reading.calls:
        if result is not None and result.timed_out:
            yield Found(index, (result.content, call.arguments, call.name))
    yield from _said(reading, FailureType.infra_tool_timeout, flagged=False)


@detector("service_error", FailureType.infra_model_api_error)
def service_error(reading: Reading) -> Iterator[Found]:
    """A foreign tool that failed for a limit of rate, its key or its server; an answer that a filter withheld."""
    yield from _said(reading, FailureType.infra_model_api_error)
    for step in reading.trace.steps:
        if step.completion.finish_reason in ("content_filter", "SAFETY", "refusal"):
            yield Found(step.index, (step.completion.message.content,), 0.9)


@detector("box_error", FailureType.infra_sandbox_failure)
def box_error(reading: Reading) -> Iterator[Found]:
    """A foreign tool that failed because its environment did: refused connections, no memory, no disk."""
    yield from _said(reading, FailureType.infra_sandbox_failure)


@detector("grader_failure", FailureType.infra_grader_failure)
def grader_failure(reading: Reading) -> Iterator[Found]:
    """A verifier gave no usable number. Its own words are in `Score.error`; quoted is what it was given."""
    if any(score.error for score in reading.scores):
        yield Found(None, (reading.trace.answer,))


def _said(reading: Reading, kind: FailureType, *, flagged: bool = True) -> Iterator[Found]:
    """Errors of foreign tools of which the words say `kind`."""
    for act, told, at in reading.errors:
        if told is kind and act.result is not None and (flagged or not act.result.timed_out):
            yield Found(act.step, (act.text,), SAID, at)
