"""What the gateway asks of a dialect. The modules `chat`, `messages` and `responses` fit it as they are."""

from __future__ import annotations

from typing import Any, Protocol

Json = dict[str, Any]


class BadRequest(ValueError):
    """A request that cannot be read: HTTP 400 in the dialect's own shape."""

    def __init__(self, field: str, problem: str) -> None:
        """field: the path to it from the body, as `messages.3.content.0.type`."""
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field = field


class Unsupported(BadRequest):
    """A request that is well-formed and has no form in chat completions."""


class BadAnswer(ValueError):
    """An upstream's answer or chunk that is none: HTTP 502."""


class Encoder(Protocol):
    """Turns the chunks of a chat completion into the server-sent events of a dialect. One answer, used once."""

    def feed(self, chunk: Json) -> bytes:
        """The events that a chunk makes; may be empty. The chunk is not changed. Raises BadAnswer."""

    def end(self) -> bytes:
        """Closes all that is open: what a client needs to take the answer for whole."""

    def fail(self, status: int, message: str, kind: str | None = None) -> bytes:
        """In place of `end` when the upstream breaks: the dialect's error event. Arguments as of `Dialect.error`."""


class Listener(Protocol):
    """Puts a stream of the dialect together while it passes by. One answer, used once."""

    @property
    def error(self) -> Json | None:
        """What the stream said went wrong, as it said it."""

    def feed(self, event: Json) -> None:
        """One event's data. What is not understood is passed over: it is another's stream, and it goes on."""

    def answer(self) -> Json | None:
        """The whole answer in the dialect; None while it has not come to its end, or when it ended in an error."""

    def partial(self) -> Json:
        """What has come so far, in the shape of an answer."""


class Dialect(Protocol):
    name: str
    path: str
    """Of its endpoint, as `/v1/messages`."""

    def to_chat(self, body: Json, *, record: bool = False) -> Json:
        """The request as one of chat completions.

        record: it is written down, not sent: what chat has no form for is kept as JSON text instead of refused.
        Raises BadRequest, or Unsupported for what could only be said in the dialect itself.
        """

    def from_chat(self, answer: Json, body: Json) -> Json:
        """A chat completion as this dialect's whole answer. body: the request in this dialect. Raises BadAnswer."""

    def encoder(self, body: Json) -> Encoder: ...

    def listener(self, body: Json) -> Listener: ...

    def answer_to_chat(self, answer: Json) -> Json:
        """A whole answer, or what there was of one, as a chat completion for the record. Raises BadAnswer.

        What chat has no form for is kept as it is under `other` of the message.
        """

    def error(self, status: int, message: str, kind: str | None = None) -> Json:
        """An error's body. kind: a word for programs, such as `budget_exceeded`."""
