"""SWE-agent trajectories (`.traj`): `{"environment", "trajectory", "history", "info", "replay_config"}`, or a
demonstration, which has the `history` alone.

Source: SWE-agent, docs/usage/trajectories.md. `trajectory` says what was done, `history` what the
model was told; they meet where a `response` is an assistant's `content`. An action that was written
as text becomes a call of `bash` with that text for its command.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from agentloop.errors import FormatError
from agentloop.formats.chat import assistant, content
from agentloop.formats.fields import Fields, read_each
from agentloop.formats.source import parse
from agentloop.formats.steps import Steps, trace_id
from agentloop.protocols import Records
from agentloop.types import Imported, Message, StopReason, ToolCall, Trace

STOPS = {
    "submitted": StopReason.submitted,
    "exit_cost": StopReason.cost_limit,
    "exit_context": StopReason.context_limit,
    "exit_command_timeout": StopReason.time_limit,
    "exit_total_execution_time": StopReason.time_limit,
    "exit_forfeit": StopReason.cancelled,
    "early_exit": StopReason.cancelled,
    "exit_format": StopReason.error,
    "exit_error": StopReason.error,
    "exit_environment_error": StopReason.error,
    "exit_api": StopReason.error,
}
OUTSIDE = {"exit_error", "exit_environment_error", "exit_api"}
"""What broke outside the agent."""
TIMED_OUT = re.compile(r"EXECUTION TIMED OUT|was cancelled because it took more than")


class SweAgentFormat:
    """A history whose messages say which agent they belong to."""

    name = "swe_agent"

    def recognises(self, source: Records) -> bool:
        """See `Format`."""
        return bool(source.head) and all(_is_run(record) for record in source.head)

    def read(self, source: Records) -> Iterator[Imported | FormatError]:
        """See `Format`."""
        yield from read_each(source, lambda fields, record: _Run(fields, record).imported(self.name))


class _Run:
    def __init__(self, fields: Fields, record: Any) -> None:
        self.fields, self.record, self.steps = fields, record, Steps()
        self.turns = list(fields.objects("trajectory"))
        self.asked: tuple[Fields | None, list[str]] = (None, [])
        """The turn that awaits what its calls gave, and their ids."""
        config = record.get("replay_config")
        try:
            self.config = parse(config, fields.where) if isinstance(config, str) else config
        except FormatError:
            self.config = None
        self.model = _text_at(self.config, "agent", "model", "name")
        self.agent: str | None = None

    def imported(self, name: str) -> Imported:
        fields = self.fields
        for message in fields.objects("history"):
            self._hear(message)
        self._observe(None)
        while self.turns:
            self._answer(None, self.turns.pop(0))
            self._observe(None)
        info = fields.fields("info") or Fields({}, fields.where)
        status, answer = info.text("exit_status"), info.text("submission")
        info.keep("exit_status", status)
        said = re.sub(r"^submitted \((.*)\)$", r"\1", status or "")
        if self.steps.unheard:
            fields.keep("unheard", [m.model_dump(mode="json", exclude_defaults=True) for m in self.steps.unheard])
        trace = Trace(
            id=trace_id(name, self.record),
            task_id=_text_at(self.config, "problem_statement", "id"),
            source=name,
            agent=self.agent,
            messages=self.steps.first,
            steps=self.steps.done(),
            answer=answer,
            stop_reason=STOPS.get(said, StopReason.unknown),
            error=status if said in OUTSIDE else None,
        )
        return Imported(trace=trace, raw=fields.left())

    def _hear(self, message: Fields) -> None:
        role, kind, agent, demo = (
            message.text("role") or "user",
            message.text("message_type"),
            message.text("agent"),
            message.truth("is_demo"),
        )
        if (role, kind) not in {("system", "system_prompt"), ("assistant", "action")} and kind != "observation":
            message.keep("message_type", kind)
        self.agent = self.agent or agent
        if agent != self.agent:
            message.keep("agent", agent)
        if role == "assistant" and demo:
            self._observe(None)
            self.steps.answer(assistant(message), copied=True)
        elif role == "assistant":
            self._observe(None)
            said = message.peek("content")
            match = next((i for i, turn in enumerate(self.turns) if turn.peek("response") == said), 0)
            for turn in self.turns[:match]:
                self._answer(None, turn)
                self._observe(None)
            self.turns = self.turns[match:]
            self._answer(message, self.turns.pop(0) if self.turns else None)
        elif self.asked[1] and not demo:
            ids = message.items("tool_call_ids")
            if ids != self.asked[1]:  # those of a text action are our own
                message.keep("tool_call_ids", ids)
            self._observe(content(message))
        else:
            self.steps.hear(Message(role=role, content=content(message)))

    def _answer(self, message: Fields | None, turn: Fields | None) -> None:
        made, reasoning = Message(role="assistant"), ""
        if message is not None:
            blocks = message.peek("thinking_blocks")
            for block in blocks if isinstance(blocks, list) else []:
                reasoning += _text_at(block, "thinking") or ""
            made = assistant(message)
        action = (turn.text("action") if turn else None) or (message.text("action") if message else None)
        response = turn.text("response") if turn else None
        made = made.model_copy(
            update={"content": made.content or response or "", "reasoning": made.reasoning + reasoning}
        )
        if not made.tool_calls and action and action.strip():
            call = ToolCall(id="call_0", name="bash", arguments=json.dumps({"command": action}, ensure_ascii=False))
            made = made.model_copy(update={"tool_calls": (call,)})
        for part in (message, turn):
            if part is not None and (thought := part.text("thought")) and thought.strip() not in made.content:
                part.keep("thought", thought)
            if part is not None and (act := part.text("action")) and act != action:
                part.keep("action", act)
        if turn is not None:
            if response != made.content:
                turn.keep("response", response)
            for key in ("messages", "query"):
                told = turn.take(key)
                told_in_full = isinstance(told, list) and told == (self.record.get("history") or [])[: len(told)]
                if told and not told_in_full:  # the model saw less than the history has
                    self.steps.compact()
                    turn.keep(key, told)
        self.steps.answer(made, model=self.model)
        self.asked = (turn, [call.id for call in made.tool_calls])

    def _observe(self, said: str | None) -> None:
        """said: what the model was told of it; None where only the turn knows."""
        turn, ids = self.asked
        self.asked = (None, [])
        seen = turn.text("observation") if turn else None
        if said is None and turn is None:
            return
        if turn and seen and (not ids or seen.strip() not in (said or seen)):
            turn.keep("observation", seen)
        text, took = (seen if said is None else said) or "", (turn.number("execution_time") if turn else None) or 0.0
        late = bool(TIMED_OUT.search(text))
        for call_id in ids:
            self.steps.result(call_id, text, ok=not late, timed_out=late, duration_s=took)


def _is_run(record: Any) -> bool:
    if not isinstance(record, dict) or not isinstance(record.get("history"), list):
        return False
    first = record["history"][0] if record["history"] else None
    return isinstance(first, dict) and {"role", "content", "agent"} <= first.keys()


def _text_at(value: Any, *keys: str) -> str | None:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None
