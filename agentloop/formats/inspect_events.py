"""What the model events of an Inspect sample tell of its answers: usage, cost, times, why an answer ended."""

from __future__ import annotations

from typing import Any

from agentloop.errors import FormatError
from agentloop.formats.fields import Fields
from agentloop.formats.inspect_log import attached_texts, content_of, resolve


class ModelEvents:
    """The events of one sample that are a model's answers, given out once each. They stay in the sample."""

    def __init__(self, sample: Fields) -> None:
        self._where = f"{sample.where}: model event"
        transcript = sample.peek("transcript")
        events = sample.peek("events") or (transcript.get("events") if isinstance(transcript, dict) else None)
        record = {key: sample.peek(key) for key in ("attachments", "transcript")}
        found = [event for event in events if isinstance(event, dict)] if isinstance(events, list) else []
        answers = [event for event in found if event.get("event") == "model"]
        if not answers and sample.peek("output"):  # what the last answer was, in a log without events
            answers = [{"output": sample.peek("output")}]
        self._answers = [resolve({**event, "input": None, "call": None}, attached_texts(record)) for event in answers]

    def of(self, message_id: object, text: str) -> dict[str, Any]:
        """Fields of the Completion of a message; empty when no event has it. Raises FormatError for a broken event."""
        for n, event in enumerate(self._answers):
            message = _at(event, "output", "choices", 0, "message")
            if not isinstance(message, dict):
                continue
            known = message.get("id")
            same = known == message_id if known and message_id else _text(message) == text
            if same:
                del self._answers[n]
                return _usage(event, self._where)
        return {}


def _usage(event: dict[str, Any], where: str) -> dict[str, Any]:
    output = Fields(event["output"], where)
    found: dict[str, Any] = {
        "model": output.text("model"),
        "started_at": Fields(event, where).time("timestamp"),
        "finish_reason": str(_at(event, "output", "choices", 0, "stop_reason") or "") or None,
    }
    if usage := output.fields("usage"):
        given = usage.integer("input_tokens") or 0
        read, written = usage.integer("input_tokens_cache_read") or 0, usage.integer("input_tokens_cache_write") or 0
        made, total = usage.integer("output_tokens") or 0, usage.integer("total_tokens")
        apart = total == given + read + written + made  # some providers count the cached ones apart
        found["n_prompt_tokens"] = given + read + written if apart else given
        found |= {"n_cached_tokens": read, "n_completion_tokens": made, "cost_usd": usage.number("total_cost")}
    return found


def _text(message: dict[str, Any]) -> str | None:
    try:
        return content_of(Fields(message, "model event"))[0]
    except FormatError:
        return None


def _at(value: Any, *keys: Any) -> Any:
    for key in keys:
        if isinstance(value, dict) and isinstance(key, str):
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return None
    return value
