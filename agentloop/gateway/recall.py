"""A policy's answers of one episode, in place of the messages in which a program repeats them.

A program sends text back, and text encoded anew is other token ids. With its own message, a policy goes on from exactly
what it sampled, as it does for our own agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from agentloop.otel.messages import messages_of
from agentloop.otel.repeats import key_of
from agentloop.policies.openai import wire
from agentloop.types import Message


class RestoredConversation(NamedTuple):
    messages: list[Message]
    digest: int
    """Of the messages as the program sent them."""


class Recall:
    """One episode's answers."""

    def __init__(self) -> None:
        self._in_place: dict[int, Message] = {}
        """Digest of a conversation that ends with an answer -> that answer."""
        self._by_content: dict[tuple[Any, ...], Message] = {}
        """Content -> the last answer with it."""

    def restored(self, messages: Sequence[Message]) -> RestoredConversation:
        """`messages`, as a program sent them, with the policy's own answers, token ids included.

        An answer that the program moved, as a compaction does, is restored as well: the policy then sees that its
        prompt does not begin with what it was before, and counts a fork.
        """
        restored = []
        digest = 0
        for message in messages:
            key = _key(message)
            digest = hash((digest, key))
            own = None
            if message.role == "assistant" and not message.token_ids:
                own = self._in_place.get(digest) or self._by_content.get(key)
            restored.append(own or message)
        return RestoredConversation(restored, digest)

    def remember(self, conversation: RestoredConversation, answer: Message) -> None:
        """The answer of the policy to `conversation`."""
        if not answer.token_ids:
            return
        (as_sent,) = messages_of(wire([answer]), answer.role)  # a call that cannot be read is text there
        key = _key(as_sent)
        self._in_place[hash((conversation.digest, key))] = answer
        self._by_content[key] = answer


def _key(message: Message) -> tuple[Any, ...]:
    """Equal for a message and its repetition. Calls have their ids, which the results after them name."""
    return key_of(message), tuple(call.id for call in message.tool_calls)
