"""The Anthropic messages API."""

from __future__ import annotations

from agentloop.gateway.dialects.dialect import Encoder, Json, Listener
from agentloop.gateway.dialects.errors import anthropic_error as error
from agentloop.gateway.dialects.messages_answer import answer_to_chat, from_chat
from agentloop.gateway.dialects.messages_request import to_chat
from agentloop.gateway.dialects.messages_stream import MessagesEncoder, MessagesListener
from agentloop.gateway.dialects.overlaid import messages as overlaid

__all__ = ["answer_to_chat", "encoder", "error", "from_chat", "listener", "name", "overlaid", "path", "to_chat"]

name = "messages"
path = "/v1/messages"


def encoder(body: Json) -> Encoder:
    return MessagesEncoder(body)


def listener(body: Json) -> Listener:
    return MessagesListener(body)
