"""A trace as detectors read it: what was called and seen, in order, whatever wrote it down.

Everything here is linear in the trace's length. Nothing here decides what went wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agentloop.judge.failures.words import cause, says_error
from agentloop.types import FailureType, Score, StopReason, Task, ToolCall, ToolResult, Trace

OURS = "agentloop"


class Call(NamedTuple):
    """One call, or what somebody who runs an agent's code printed, which has no call."""

    step: int
    call: ToolCall | None
    result: ToolResult | None
    text: str
    """What came back; "" when nothing did."""
    failed: bool
    """By its own flag or exit code; where its source has neither, by its words."""
    told: bool
    """True where a flag or an exit code says whether it failed, and no words need be read."""

    @property
    def ok(self) -> bool:
        """It came back, and did not fail."""
        return self.result is not None and not self.failed

    @property
    def name(self) -> str:
        """The tool's name; "" for a terminal that nobody called."""
        return self.call.name if self.call else ""


@dataclass(frozen=True, slots=True)
class Reading:
    """A trace with what is known of it; what every detector is given."""

    task: Task
    trace: Trace
    """Without a broken step: what ended the run is its error, and half an answer is nothing that the policy did."""
    reward: float | None = None
    scores: Sequence[Score] = ()
    ended: FailureType | None = None
    """What the word with which a foreign run ended stands for (`vocabularies.EXITS`)."""
    offered: frozenset[str] | None = None
    """Names of the tools that the agent was offered; None where nobody said."""
    expected: tuple[Mapping[str, Any], ...] | None = None
    """`{"name": …, "arguments": {…}}` of each call that the task expects; None where it says nothing of calls."""
    acts: Sequence[Call] = field(init=False)
    """Calls and what terminals printed, in order; those of copied steps are not the agent's own."""
    calls: Sequence[tuple[int, ToolCall, ToolResult | None]] = field(init=False)
    """`acts` without terminals."""
    errors: Sequence[tuple[Call, FailureType | None, int]] = field(init=False)
    """Of a foreign trace each act that failed, what its words say was the cause, and where in its text."""

    def __post_init__(self) -> None:
        if any(step.is_broken for step in self.trace.steps):
            object.__setattr__(self, "trace", self.trace.model_copy(update={"steps": self.trace.answered}))
        acts = list(_acts(self.trace))
        object.__setattr__(self, "acts", acts)
        made = [(act.step, act.call, act.result) for act in acts if act.call is not None]
        object.__setattr__(self, "calls", made)
        failed = [act for act in acts if act.failed] if self.foreign else []
        causes = {text: cause(text) for text in {act.text for act in failed}}  # who repeats an error repeats its words
        errors = [(act, *causes[act.text]) for act in failed]
        object.__setattr__(self, "errors", errors)

    @property
    def foreign(self) -> bool:
        """Somebody else's trace: its tools' words are all there is, and our tools' conventions do not hold."""
        return self.trace.source != OURS

    @property
    def lost(self) -> bool:
        """Known to have failed: detectors of the outcome wait for this and never guess."""
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

    @property
    def last_said(self) -> str:
        """What the agent said in its last step."""
        return self.trace.steps[-1].completion.message.content if self.trace.steps else ""

    @property
    def went_on_calling(self) -> bool:
        """True when the last step made a call, so that the agent had not finished by itself."""
        return bool(self.trace.steps and self.trace.steps[-1].completion.message.tool_calls)


def _acts(trace: Trace) -> Iterator[Call]:
    before: int | None = None
    foreign = trace.source != OURS
    for step in trace.steps:
        if before is not None:
            for message in step.heard:
                if message.role == "tool" and message.content:  # a terminal ran what the step before had written
                    made = ToolResult(call_id="", name=message.name or "", content=message.content, ok=True)
                    yield _act(before, None, made, foreign)
        before = None if step.copied else step.index
        if step.copied:
            continue
        results: dict[str, ToolResult] = {}
        for result in step.results:
            results.setdefault(result.call_id, result)
        for call in step.completion.message.tool_calls:
            yield _act(step.index, call, results.get(call.id), foreign)


def _act(step: int, call: ToolCall | None, result: ToolResult | None, foreign: bool) -> Call:
    if result is None:
        return Call(step, call, None, "", False, False)
    told = not foreign or not result.ok or result.timed_out or result.exit_code is not None
    failed = not result.ok or result.timed_out or (not told and says_error(result.content))
    return Call(step, call, result, result.content, failed, told)
