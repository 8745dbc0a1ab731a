"""The OpenAI responses API."""

from __future__ import annotations

from agentloop.gateway.dialects.dialect import Encoder, Json, Listener
from agentloop.gateway.dialects.errors import openai_error as error
from agentloop.gateway.dialects.overlaid import responses as overlaid
from agentloop.gateway.dialects.responses_answer import answer_to_chat, from_chat
from agentloop.gateway.dialects.responses_request import to_chat
from agentloop.gateway.dialects.responses_stream import ResponsesEncoder, ResponsesListener

__all__ = ["answer_to_chat", "encoder", "error", "from_chat", "listener", "name", "overlaid", "path", "to_chat"]

name = "responses"
path = "/v1/responses"


def encoder(body: Json) -> Encoder:
    return ResponsesEncoder(body)


def listener(body: Json) -> Listener:
    return ResponsesListener(body)
