"""A trace as detectors read it: what was called and seen, in order, whatever wrote it down.

Everything here is linear in the trace's length. Nothing here decides what went wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agentloop.failures.closing import Closing, closing, is_empty
from agentloop.failures.detectors.schemas import Offered, offered
from agentloop.failures.detectors.words import cause, says_error
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
    flagged: bool
    """True where a flag or an exit code says whether it failed, and no words need be read."""

    @property
    def ok(self) -> bool:
        """It came back, and did not fail."""
        return self.result is not None and not self.failed

    @property
    def name(self) -> str:
        """The tool's name; "" for a terminal without a call."""
        return self.call.name if self.call else ""

    @property
    def arguments(self) -> str | None:
        """The call's arguments; None for a terminal without a call."""
        return self.call.arguments if self.call else None


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
    offered: Offered | None = None
    """The tools that the agent was offered; None where nobody said. Where it is not given, it is what the steps say."""
    expected: tuple[Mapping[str, Any], ...] | None = None
    """`{"name": …, "arguments": {…}}` of each call that the task expects; None where it says nothing of calls."""
    wanted: str | None = None
    """The answer that the task expects, as its source wrote it down; None where it says nothing of one."""
    acts: Sequence[Call] = field(init=False)
    """Calls and what terminals printed, in order; those of copied steps are not the agent's own."""
    calls: Sequence[tuple[int, ToolCall, ToolResult | None]] = field(init=False)
    """`acts` without terminals."""
    errors: Sequence[tuple[Call, FailureType | None, int]] = field(init=False)
    """Where `by_words` holds, each act that failed, what its words say was the cause, and where in its text."""

    def __post_init__(self) -> None:
        if any(step.is_broken for step in self.trace.steps):
            object.__setattr__(self, "trace", self.trace.model_copy(update={"steps": self.trace.answered}))
        if self.offered is None:
            object.__setattr__(self, "offered", offered([tool for step in self.trace.steps for tool in step.tools]))
        acts = list(_acts(self.trace))
        object.__setattr__(self, "acts", acts)
        calls = [(act.step, act.call, act.result) for act in acts if act.call is not None]
        object.__setattr__(self, "calls", calls)
        failures = [act for act in acts if act.failed and self.by_words]
        causes = {text: cause(text) for text in {act.text for act in failures}}  # repeated errors have equal texts
        errors = [(act, *causes[act.text]) for act in failures]
        object.__setattr__(self, "errors", errors)

    @property
    def foreign(self) -> bool:
        """Somebody else's trace: its tools' words are all there is, and our tools' conventions do not hold."""
        return self.trace.source != OURS

    @property
    def by_words(self) -> bool:
        """Only its words say whether a tool failed: of a foreign trace, and of a program that ran in our sandbox.

        Such a run is labelled alike, whether it came through the gateway or ran in a sandbox.
        """
        return _by_words(self.trace)

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
    def closing(self) -> Closing | None:
        """The last step that says or does something; None when no step does."""
        return closing(self.trace)

    @property
    def last_step(self) -> int | None:
        """Index of the last step with text or calls: a message such as `TERMINATE` decided nothing."""
        last = self.closing
        return last.step if last else None

    @property
    def last_said(self) -> str:
        """The agent's text in that step."""
        last = self.closing
        return last.text if last else ""

    @property
    def went_on_calling(self) -> bool:
        """True when the last step made a call, so that the agent had not finished by itself."""
        return bool(self.trace.steps and self.trace.steps[-1].completion.message.tool_calls)


def _acts(trace: Trace) -> Iterator[Call]:
    before: int | None = None
    by_words = _by_words(trace)
    for step in trace.steps:
        if before is not None:
            for message in step.heard:
                if message.role == "tool" and message.content:  # a terminal ran what the step before had written
                    terminal_result = ToolResult(call_id="", name=message.name or "", content=message.content, ok=True)
                    yield _act(before, None, terminal_result, by_words)
        if step.copied:
            before = None
        elif not is_empty(step):  # a message that only ends the run has nothing that a terminal could run
            before = step.index
        if step.copied:
            continue
        for call, result in step.calls:
            yield _act(step.index, call, result, by_words)


def _by_words(trace: Trace) -> bool:
    return trace.program or trace.source != OURS


def _act(step: int, call: ToolCall | None, result: ToolResult | None, by_words: bool) -> Call:
    if result is None:
        return Call(step, call, None, "", False, False)
    is_flagged = not by_words or not result.ok or result.timed_out or result.exit_code is not None
    failed = not result.ok or result.timed_out or (not is_flagged and says_error(result.content))
    return Call(step, call, result, result.content, failed, is_flagged)
