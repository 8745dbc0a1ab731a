"""mini-swe-agent trajectories: `{"info", "messages", "trajectory_format": "mini-swe-agent-1" or "-1.1"}`, and
the bare list of messages that came before them.

Source: mini-swe-agent, docs/usage/output_files.md. Commands are called as tools (1.1) or written as
one fenced block, which becomes a call of `bash`; then the user message that follows is its result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from agentloop.errors import FormatError
from agentloop.formats.chat import assistant, content
from agentloop.formats.fields import Fields, read_each, read_one
from agentloop.formats.steps import Steps, trace_id
from agentloop.protocols import Records
from agentloop.types import Imported, Message, StopReason, ToolCall, Trace

FENCED = re.compile(r"```(?:mswea_bash_command|bash)\s*\n(.*?)\n```", re.DOTALL)
RETURNED = re.compile(r"\s*<returncode>(-?\d{1,9})</returncode>")
TIMED_OUT = re.compile(r"The last command .{0,20000} timed out", re.DOTALL)
STOPS = {
    "Submitted": StopReason.submitted,
    "LimitsExceeded": StopReason.step_limit,
    "TimeExceeded": StopReason.time_limit,
    "ContextWindowExceededError": StopReason.context_limit,
    "UserInterruption": StopReason.cancelled,
    "KeyboardInterrupt": StopReason.cancelled,
}


class MiniSweAgentFormat:
    """A `trajectory_format` that says so, or messages with its fence."""

    name = "mini_swe_agent"

    def recognises(self, source: Records) -> bool:
        """See `Format`."""
        return bool(source.head) and all(_is_run(record) for record in source.head)

    def read(self, source: Records) -> Iterator[Imported | FormatError]:
        """See `Format`."""
        try:
            head = source.head
            bare = len(head) == 1 and isinstance(head[0], list)
        except FormatError as error:
            yield error
            return
        if bare:
            yield read_one(source.name, {"messages": head[0]}, self._trace)
        else:
            yield from read_each(source, self._trace)

    def _trace(self, fields: Fields, record: Any) -> Imported:
        steps = Steps()
        model = _model(record)
        waits = False
        """Whether the command of a fenced block has no result yet."""
        final = Fields({}, fields.where)
        for message in fields.objects("messages"):
            role = message.text("role") or "user"
            extra = message.fields("extra") or Fields({}, message.where)
            if role == "assistant":
                message_of_step = _with_command(assistant(message), extra)
                waits = bool(message_of_step.tool_calls) and message_of_step.tool_calls[0].id == "call_0"
                steps.answer(message_of_step, started_at=extra.time("timestamp"), **_usage(extra, model))
            elif role == "exit":
                final = extra
                steps.hear(Message(role=role, content=content(message)))
            elif role == "tool" or waits:
                _result(steps, message, extra)
                waits = False
            else:
                steps.hear(Message(role=role, content=content(message)))
        info = fields.fields("info") or Fields({}, fields.where)
        status = info.text("exit_status") or final.text("exit_status")
        info.keep("exit_status", status)
        answer = info.text("submission") or final.text("submission")
        if steps.unheard:
            fields.keep("unheard", [m.model_dump(mode="json", exclude_defaults=True) for m in steps.unheard])
        stop = STOPS.get(status, StopReason.error) if status else StopReason.unknown
        trace = Trace(
            id=trace_id(self.name, record),
            task_id=fields.text("instance_id"),
            source=self.name,
            messages=steps.first,
            steps=steps.done(),
            answer=answer,
            stop_reason=stop,
            error=status if stop is StopReason.error else None,
        )
        return Imported(trace=trace, raw=fields.left())


def _with_command(message: Message, extra: Fields) -> Message:
    """With the call that the fenced block is, where none is called as a tool; two blocks are none to it."""
    fences = FENCED.findall(message.content)
    if message.tool_calls or len(fences) != 1:
        return message
    arguments = json.dumps({"command": fences[0].strip()}, ensure_ascii=False)
    return message.model_copy(update={"tool_calls": (ToolCall(id="call_0", name="bash", arguments=arguments),)})


def _usage(extra: Fields, model: str | None) -> dict[str, Any]:
    """What a Completion takes from the endpoint's response, of which the rest stays."""
    usage: dict[str, Any] = {"model": model, "cost_usd": extra.number("cost")}
    if response := extra.fields("response"):
        usage["model"] = response.text("model") or model
        if counts := response.fields("usage"):
            usage["n_prompt_tokens"] = counts.integer("prompt_tokens") or 0
            usage["n_completion_tokens"] = counts.integer("completion_tokens") or 0
            if details := counts.fields("prompt_tokens_details"):
                usage["n_cached_tokens"] = details.integer("cached_tokens") or 0
        choices = list(response.objects("choices"))
        if choices:
            usage["finish_reason"] = choices[0].text("finish_reason")
    return usage


def _result(steps: Steps, message: Fields, extra: Fields) -> None:
    text = content(message)
    call_id = message.text("tool_call_id")
    code = extra.integer("returncode")
    late = bool(TIMED_OUT.match(text))
    if code is None and (match := RETURNED.match(text)):
        code = int(match.group(1))
    raised = extra.text("exception_info")
    if raised and raised not in text:
        extra.keep("exception_info", raised)
    output = extra.text("raw_output")
    if output and output.strip() not in text:
        extra.keep("raw_output", output)
    ok = code in (0, None) and not late and not raised
    steps.result(call_id, text, ok=ok, exit_code=code, timed_out=late or "timed out" in (raised or ""))


def _model(record: Any) -> str | None:
    for key in ("info", "config", "model", "model_name"):
        record = record.get(key) if isinstance(record, dict) else None
    return record if isinstance(record, str) else None


def _is_run(record: Any) -> bool:
    if isinstance(record, dict):
        return str(record.get("trajectory_format")).startswith("mini-swe-agent")
    if not isinstance(record, list) or not all(
        isinstance(m, dict) and isinstance(m.get("content"), str) for m in record
    ):
        return False
    return any(m.get("role") == "assistant" and "```mswea_bash_command" in m["content"] for m in record) or (
        any(m.get("role") == "assistant" and FENCED.search(m["content"]) for m in record)
        and any(m.get("role") == "user" and RETURNED.match(m["content"]) for m in record)
    )
