"""Items of the Responses API, put together to the turns that a model answered in.

The API lists reasoning, text and calls each by itself. What follows one another without a result or another's words
between is one turn, until reasoning or text comes after text or a call: a model thinks and speaks before it calls.
"""

from __future__ import annotations

from typing import Any

from agentloop.errors import FormatError
from agentloop.formats.chat import ROLES
from agentloop.formats.fields import Fields, numbers, whole_numbers
from agentloop.formats.items_parts import CALLS, COMPACTED, HOSTED, NOTHING, call_of, plain, result_of, text
from agentloop.formats.steps import Steps
from agentloop.types import Message, ToolCall


class Items:
    """Adds items to `steps`; `close` when no more come."""

    def __init__(self, steps: Steps, *, model: str | None = None, copied: bool = False) -> None:
        """copied: they were the prompt's, so that their answers were not given here."""
        self._steps = steps
        self._model = model
        self._copied = copied
        self._clear()

    def add(self, item: Fields) -> None:
        """Raises FormatError with the place of what is broken. An item of a kind that is not known stays as it is."""
        kind = item.peek("type") or "message"
        if not isinstance(kind, str):
            raise FormatError(f"{item.where}: type: got {kind!r:.40}, expected text")
        if kind == "message":
            self._message(item)
        elif kind == "reasoning":
            self._begin(bool(self._text or self._calls), item)
            full = item.peek("content") not in NOTHING
            self._reasoning.append(text(item, "content" if full else "summary"))
        elif kind in CALLS:
            self._begin(False, item)
            self._calls.append(call_of(item, kind, CALLS[kind], len(self._calls)))
        elif kind in HOSTED:
            self._begin(False, item)
            self._hosted(item, kind)
        elif kind.endswith("_call_output"):
            self.close()
            call_id = item.text("call_id") or item.text("id")
            self._steps.result(call_id, **result_of(item))
        elif kind in COMPACTED:
            self.close()
            self._steps.compact()
            return
        else:
            return
        item.take("type")
        if item.peek("status") == "completed":
            item.take("status")

    def close(self) -> None:
        """The turn ends here."""
        reasoning = self._reasoning
        text = self._text
        calls = self._calls
        tokens = self._tokens
        hosted = self._results
        self._clear()
        if not (reasoning or text or calls):
            return
        message = Message(
            role="assistant",
            content="".join(text),
            reasoning="\n".join(reasoning),
            tool_calls=tuple(calls),
            token_ids=tokens.pop("token_ids", ()),
        )
        self._steps.answer(message, copied=self._copied, model=self._model, **tokens)
        for call_id, result in hosted:
            self._steps.result(call_id, **result)

    def _clear(self) -> None:
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._calls: list[ToolCall] = []
        self._tokens: dict[str, Any] = {}
        self._results: list[tuple[str, dict[str, Any]]] = []

    def _begin(self, is_next: bool, item: Fields) -> None:
        """Makes room for an item: of the turn that is open, or of the next one. Each has one list of sampled tokens."""
        sampled = whole_numbers(item, "generation_token_ids")
        if is_next or (sampled and self._tokens):
            self.close()
        if sampled:
            self._tokens = {
                "token_ids": sampled,
                "prompt_token_ids": whole_numbers(item, "prompt_token_ids"),
                "logprobs": numbers(item, "generation_log_probs"),
            }

    def _message(self, item: Fields) -> None:
        role = item.text("role")
        if role not in ROLES:
            raise FormatError(f"{item.where}: role: {role!r} is none of {', '.join(sorted(ROLES))}")
        if role == "assistant":
            self._begin(bool(self._text or self._calls), item)
            self._text.append(text(item, "content"))
        else:
            self.close()
            self._steps.hear(Message(role=role, content=text(item, "content")))

    def _hosted(self, item: Fields, kind: str) -> None:
        passed, keys = HOSTED[kind]
        call = call_of(item, kind, passed, len(self._calls))
        self._calls.append(call)
        error = item.take("error")
        status = item.peek("status")
        result = item.take(keys)
        if error is not None or result is not None:
            ok = error is None and status != "failed"
            self._results.append((call.id, {"content": plain(result if error is None else error), "ok": ok}))
