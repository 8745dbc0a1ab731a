"""Chat completions as they stream: put together, and passed on without what the client did not ask for."""

from __future__ import annotations

from array import array
from typing import Any

from agentloop.gateway.dialects import sse
from agentloop.gateway.dialects.calls import Calls
from agentloop.gateway.dialects.dialect import Json
from agentloop.gateway.dialects.errors import openai_error as error

ONCE = ("id", "created", "model", "system_fingerprint", "service_tier", "prompt_token_ids")
"""Fields of chunks that say the same in each, or come with the first only."""


class ChatListener:
    """Of a token it keeps numbers alone: `token_ids` and `logprobs.content` of its answers are arrays of them.

    An answer may have hundreds of thousands, and what a server says of each fills ten times their room.
    """

    def __init__(self, body: Json) -> None:
        n = body.get("n")
        self._n_choices = n if isinstance(n, int) else 1
        self._once: Json = {}
        self._choices: dict[int, Choice] = {}
        self._usage: Json | None = None
        self.error: Json | None = None

    def feed(self, event: Json) -> None:
        if event.get("error"):
            self.error = event
        once = self._once
        for name in ONCE:
            if name not in once and event.get(name) is not None:
                once[name] = event[name]
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
        choices = event.get("choices")
        for position, said in enumerate(choices) if isinstance(choices, list) else ():
            if isinstance(said, dict):
                index = said.get("index")
                index = index if isinstance(index, int) else position
                choice = self._choices.get(index)
                if choice is None:
                    choice = self._choices[index] = Choice()
                choice.feed(said)

    def answer(self) -> Json | None:
        """Whole when every choice said why it ended: some servers send no usage, some no `[DONE]`."""
        if self.error or len(self._choices) < self._n_choices:
            return None
        return self.partial() if all(choice.finish for choice in self._choices.values()) else None

    def partial(self) -> Json:
        made: Json = {"object": "chat.completion", **self._once}
        made["choices"] = [self._choices[index].whole(index) for index in sorted(self._choices)]
        if self._usage is not None:
            made["usage"] = self._usage
        return made


class Choice:
    """One choice of a stream, its texts in lists that are joined when it has ended."""

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {}
        """Field of the message -> its pieces."""
        self.calls = Calls()
        self.ids: array[int] | None = array("q")
        """None when there was one that is no number."""
        self.logprobs = array("d")
        self.finish: str | None = None
        self.stop: Any = None

    def feed(self, said: Json) -> None:
        delta = said.get("delta")
        if isinstance(delta, dict):
            for name, value in delta.items():
                if type(value) is str:
                    if name != "role":
                        pieces = self.texts.get(name)
                        if pieces is None:
                            pieces = self.texts[name] = []
                        pieces.append(value)
                elif name == "tool_calls":
                    for _ in self.calls.feed(value):
                        pass
        ids = said.get("token_ids")
        if isinstance(ids, list) and self.ids is not None:
            try:
                self.ids.extend(ids)
            except (TypeError, OverflowError):
                self.ids = None
        logprobs = said.get("logprobs")
        if isinstance(logprobs, dict) and isinstance(found := logprobs.get("content"), list):
            for token in found:
                value = token.get("logprob") if isinstance(token, dict) else None
                if isinstance(value, float | int):
                    self.logprobs.append(value)
        if said.get("finish_reason"):
            self.finish = said["finish_reason"]
            self.stop = said.get("stop_reason")

    def whole(self, index: int) -> Json:
        for pieces in self.texts.values():
            pieces[:] = ["".join(pieces)]  # once: it is asked for more than once
        texts = {name: said for name, (said,) in self.texts.items() if said}
        content = texts.pop("content", "")
        message: Json = {"role": "assistant", "content": content, **texts}
        if self.calls.begun:
            message["tool_calls"] = [call.whole() for call in self.calls.begun]
        if not content and (texts.get("refusal") or self.calls.begun):
            message["content"] = None
        made: Json = {"index": index, "message": message, "finish_reason": self.finish}
        made["logprobs"] = {"content": self.logprobs} if self.logprobs else None
        if self.ids:
            made["token_ids"] = self.ids
        if self.stop is not None:
            made["stop_reason"] = self.stop
        return made


class Asked:
    """Takes out of an answer or chunk what the gateway asked for and the client did not."""

    def __init__(self, body: Json) -> None:
        self._logprobs = bool(body.get("logprobs"))
        self._ids = bool(body.get("return_token_ids"))
        options = body.get("stream_options")
        self.usage = bool(options.get("include_usage")) if isinstance(options, dict) else False

    def strip(self, answer: Json) -> Json:
        """A copy, as far as it differs."""
        if self._ids and self._logprobs:
            return answer
        unasked = set() if self._ids else {"token_ids", "prompt_token_ids"}
        if not self._logprobs:
            unasked.add("logprobs")
        made = {name: value for name, value in answer.items() if name not in unasked}
        choices = answer.get("choices")
        if isinstance(choices, list):
            made["choices"] = [
                {name: value for name, value in choice.items() if name not in unasked}
                for choice in choices
                if isinstance(choice, dict)
            ]
        return made


class ChatEncoder:
    def __init__(self, body: Json) -> None:
        self._asked = Asked(body)

    def feed(self, chunk: Json) -> bytes:
        made = self._asked.strip(chunk)
        choices = made.get("choices")
        if not self._asked.usage and "usage" in made:
            if not choices:
                return b""
            made = {name: value for name, value in made.items() if name != "usage"}
        if made is not chunk and _says_nothing(choices):
            return b""  # of a token that a parser of tool calls kept back: vLLM sends it for its id alone
        return sse.data(made)

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"

    def fail(self, status: int, message: str, kind: str | None = None) -> bytes:
        return sse.data(error(status, message, kind))


def _says_nothing(choices: Any) -> bool:
    found = choices if isinstance(choices, list) else []
    return bool(found) and not any(said.get("delta") or said.get("finish_reason") for said in found)
