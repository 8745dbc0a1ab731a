"""Usage, cost, times and finish reasons of the answers in an Inspect sample, from its model events."""

from __future__ import annotations

from typing import Any

from agentloop.errors import FormatError
from agentloop.formats.fields import Fields, at, list_at
from agentloop.formats.inspect_log import attached_texts, content_of, resolve


class ModelEvents:
    """The events of one sample that are a model's answers. `of` returns each once; they stay in the sample."""

    def __init__(self, sample: Fields) -> None:
        self._where = f"{sample.where}: model event"
        events = list_at(sample.peek("events") or sample.peek("transcript", "events"))
        record = {key: sample.peek(key) for key in ("attachments", "transcript")}
        answers = [event for event in events if at(event, "event") == "model"]
        if not answers and sample.peek("output"):  # a log without events has the last answer there
            answers = [{"output": sample.peek("output")}]
        self._answers = [resolve({**event, "input": None, "call": None}, attached_texts(record)) for event in answers]

    def of(self, message_id: object, text: str) -> dict[str, Any]:
        """Fields of the Completion of a message; empty when no event has it. Raises FormatError for a broken event."""
        for n, event in enumerate(self._answers):
            message = at(event, "output", "choices", 0, "message")
            if not isinstance(message, dict):
                continue
            own_id = message.get("id")
            if own_id and message_id:
                is_same = own_id == message_id
            else:
                is_same = _text(message) == text
            if is_same:
                del self._answers[n]
                return _usage(event, self._where)
        return {}


def _usage(event: dict[str, Any], where: str) -> dict[str, Any]:
    output = Fields(event["output"], where)
    values: dict[str, Any] = {
        "model": output.text("model"),
        "started_at": Fields(event, where).time("timestamp"),
        "finish_reason": str(at(event, "output", "choices", 0, "stop_reason") or "") or None,
    }
    if usage := output.fields("usage"):
        n_input = usage.integer("input_tokens") or 0
        read = usage.integer("input_tokens_cache_read") or 0
        written = usage.integer("input_tokens_cache_write") or 0
        n_output = usage.integer("output_tokens") or 0
        total = usage.integer("total_tokens")
        if total == n_input + read + written + n_output:  # some providers count the cached ones separately
            n_input += read + written
        values["n_prompt_tokens"] = n_input
        values |= {"n_cached_tokens": read, "n_completion_tokens": n_output, "cost_usd": usage.number("total_cost")}
    return values


def _text(message: dict[str, Any]) -> str | None:
    try:
        return content_of(Fields(message, "model event"))[0]
    except FormatError:
        return None
