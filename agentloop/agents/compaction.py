"""What to do when a conversation has no more room: stop, drop what is oldest, or have it summarised.

The choice is the user's, `[agent] compaction`, and is never made in silence: a step that was asked in a shortened
context is marked `compacted`, and has that context. A summary is the policy's own words; the call that made it is
recorded as a child of the run and not as a step, because it is no turn at the task: none of its calls is made, it
counts for no limit of steps, and is not what later steps' prompts extend.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from agentloop.types import Completion, Message

Share: TypeAlias = Callable[[Sequence[Message]], float]
"""How much of the room messages take; more than 1 does not fit."""
Ask: TypeAlias = Callable[[Sequence[Message]], Awaitable[Completion | None]]
"""Asks the policy; None when there is no time left. A call in its answer is not made."""
TARGET = 0.5
"""Share of the room that is taken after a conversation was shortened: to do it each turn would lose every cache."""
SUMMARISE = (
    "There is no more room for this conversation. Write down, for yourself, all that is needed to go on: what was "
    "found out, what was done and changed, what failed, what is left to do. Exact names, paths and values. "
    "Everything but the task and your summary will be gone. Call no tool now."
)
SUMMARY = "What you have written down of the work so far, which is gone:\n\n"


class Compaction(Protocol):
    """How a conversation is shortened."""

    name: str

    async def shorten(self, messages: Sequence[Message], n_first: int, share: Share, ask: Ask) -> list[Message]:
        """A shorter conversation, or as much as was given when there is nothing to be done.

        n_first: messages at its beginning that say what the task is.
        """
        ...


class Stop:
    """Shortens nothing, so the episode ends with `context_limit`."""

    name = "none"

    async def shorten(self, messages: Sequence[Message], n_first: int, share: Share, ask: Ask) -> list[Message]:
        """See `Compaction`."""
        return list(messages)


class Drop:
    """The oldest results of tools are replaced by a line each that says so, but for those of the last turn."""

    name = "drop"

    def __init__(self, target: float = TARGET) -> None:
        self._target = target

    async def shorten(self, messages: Sequence[Message], n_first: int, share: Share, ask: Ask) -> list[Message]:
        """See `Compaction`."""
        shortened = list(messages)
        last_turn = max((n for n, message in enumerate(shortened) if message.role == "assistant"), default=0)
        for n, message in enumerate(shortened[:last_turn]):
            if share(shortened) <= self._target:
                break
            line = f"[{len(message.content):,} characters of this result were left out for want of room]"
            if message.role == "tool" and len(line) < len(message.content):
                shortened[n] = message.model_copy(update={"content": line})
        return shortened


class Summarise:
    """The policy writes a summary, which takes the place of all but the first messages."""

    name = "summarise"

    async def shorten(self, messages: Sequence[Message], n_first: int, share: Share, ask: Ask) -> list[Message]:
        """See `Compaction`. What the policy is asked with fits: the oldest results may be left out of that."""
        fitting = await Drop(target=1.0).shorten(messages, n_first, share, ask)
        completion = await ask([*fitting, Message(role="user", content=SUMMARISE)])
        words = completion.message.content.strip() if completion else ""
        if not words:
            return list(messages)
        return [*messages[:n_first], Message(role="user", content=SUMMARY + words)]


COMPACTIONS: Mapping[str, Callable[[], Compaction]] = {"none": Stop, "drop": Drop, "summarise": Summarise}
