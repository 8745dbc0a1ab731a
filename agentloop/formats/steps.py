"""Steps of a trace, made from messages in the order in which they were said."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from agentloop.types import Completion, Message, Step, ToolCall, ToolResult, content_hash

_Asked = tuple[dict[str, Any], dict[str, list[ToolCall]]]
"""A step and its calls that have no result, by id; those that share one in their order."""

MAX_AGENTS = 32
"""Sub-agents of sub-agents that are followed; a deeper one, or one that starts itself, stands beside the first ones."""


def trace_id(format_name: str, record: object) -> str:
    """32 hex digits made of the record's content, so that an import that is repeated writes nothing twice."""
    return content_hash([format_name, record])[:32]


class Steps:
    """Collects what was heard, answered and given back; an answer begins a step."""

    def __init__(self) -> None:
        self._first: list[Message] = []
        self._heard: list[Message] = []
        self._steps: list[dict[str, Any]] = []
        self._compacted = False
        self._waiting: list[_Asked] = []
        self._asked: dict[str, list[_Asked]] = {}

    @property
    def first(self) -> tuple[Message, ...]:
        """What was said before the first answer."""
        return tuple(self._first)

    def hear(self, message: Message) -> None:
        """A message that is neither an answer nor the result of a tool."""
        (self._heard if self._steps else self._first).append(message)

    def compact(self) -> None:
        """The context was shortened here."""
        self._compacted = True

    def answer(
        self, message: Message, *, started_at: datetime | None = None, copied: bool = False, **usage: Any
    ) -> None:
        """The policy's next message. usage: further fields of its Completion."""
        finish = usage.pop("finish_reason", None) or ("tool_calls" if message.tool_calls else "stop")
        self._steps.append(
            {
                "index": len(self._steps),
                "heard": tuple(self._heard),
                "completion": Completion(message=message, finish_reason=finish, **usage),
                "results": [],
                "started_at": started_at,
                "compacted": self._compacted,
                "copied": copied,
            }
        )
        self._heard, self._compacted = [], False
        asked: _Asked = (self._steps[-1], {})
        for call in message.tool_calls:
            if call.id not in asked[1]:
                self._asked.setdefault(call.id, []).append(asked)
            asked[1].setdefault(call.id, []).append(call)
        self._waiting.append(asked)

    def result(self, call_id: str | None, content: str, *, name: str | None = None, **more: Any) -> None:
        """What a tool gave back. One without an id belongs to the first call that has none yet.

        more: further fields of the ToolResult; without `ok` it is one that went well, which is what a
        source that tells nothing of errors means.
        """
        found = self._call(call_id)
        if found is None:  # a result of nothing that was asked for is something the policy was told
            self.hear(Message(role="tool", content=content, tool_call_id=call_id, name=name))
            return
        step, call = found
        made = {"ok": True, **more}
        step["results"].append(ToolResult(call_id=call.id, name=name or call.name, content=content, **made))

    def _call(self, call_id: str | None) -> tuple[dict[str, Any], ToolCall] | None:
        """The call that is meant, and its step, which it no longer waits in; looked up, as runs have thousands."""
        while self._waiting and not self._waiting[-1][1]:
            self._waiting.pop()
        if call_id is None and self._waiting:
            step, calls = self._waiting[-1]
            return step, _first(calls, next(iter(calls)))
        steps = self._asked.get(call_id or "", [])
        while steps:
            step, calls = steps[-1]
            if call_id in calls:
                return step, _first(calls, call_id)
            steps.pop()
        return None

    def done(self) -> tuple[Step, ...]:
        """The steps; what was heard after the last one is a result nobody answered, and is heard by none."""
        return tuple(Step(**{**step, "results": tuple(step["results"])}) for step in self._steps)

    @property
    def unheard(self) -> tuple[Message, ...]:
        """What was said after the last answer."""
        return tuple(self._heard)


def _first(calls: dict[str, list[ToolCall]], call_id: str) -> ToolCall:
    """Take out the first call of that id."""
    call = calls[call_id].pop(0)
    if not calls[call_id]:
        del calls[call_id]
    return call
