"""OpenAI chat completions: the dialect that every upstream speaks and every call is recorded in.

Source: platform.openai.com/docs/api-reference/chat; token ids as vLLM adds them.
"""

from __future__ import annotations

from agentloop.gateway.dialects import values
from agentloop.gateway.dialects.chat_stream import AnswerFilter, ChatEncoder, ChatListener
from agentloop.gateway.dialects.dialect import BadAnswer, BadRequest, Encoder, Json, Listener
from agentloop.gateway.dialects.errors import openai_error as error
from agentloop.gateway.dialects.overlaid import chat as overlaid

__all__ = ["answer_to_chat", "encoder", "error", "from_chat", "listener", "name", "overlaid", "path", "to_chat"]

name = "chat"
path = "/v1/chat/completions"


def to_chat(body: Json, *, record: bool = False) -> Json:
    """The request unchanged, if it has messages. The upstream validates their content."""
    values.table(body.get("stream_options") or {}, "stream_options")
    messages = values.array(body.get("messages"), "messages")
    if not messages:
        raise BadRequest("messages", "empty; send at least one")
    for n, message in enumerate(messages):
        values.text(values.table(message, f"messages.{n}").get("role"), f"messages.{n}.role")
    return body


def from_chat(answer: Json, body: Json) -> Json:
    """The answer without log-probabilities and token ids that the client did not request."""
    if not answer.get("choices"):
        raise BadAnswer("the upstream's answer has no choices")
    return AnswerFilter(body).strip(answer)


def encoder(body: Json) -> Encoder:
    return ChatEncoder(body)


def listener(body: Json) -> Listener:
    return ChatListener(body)


def answer_to_chat(answer: Json) -> Json:
    return answer
