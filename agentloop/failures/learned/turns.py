"""A trace turn by turn: who spoke, what was said, and what stood around it, each text cut to the same length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from agentloop.types import Step, Trace

MAX_TEXT = 2_000
"""Characters looked at of one text, half from its beginning and half from its end."""


class TurnTexts(NamedTuple):
    """A step as the features see it."""

    speaker: str
    own_words: str
    heard_words: str
    """What it answered to: words of others, and what the tools of the step before gave."""
    back: str
    """What its own tools gave, and what a terminal said next."""
    answered: str
    """What a person or another agent that is no step said next."""


def turns(trace: Trace) -> list[TurnTexts]:
    """The steps with what was said around them."""
    steps = trace.steps
    all_turns = []
    heard = trace.messages
    results = list[str]()
    for place, step in enumerate(steps):
        following = steps[place + 1].heard if place + 1 < len(steps) else ()
        gave = [result.content for result in step.results]
        all_turns.append(
            TurnTexts(
                speaker=speaker(step),
                own_words=spoken(step),
                heard_words=cut([m.content for m in heard if m.role != "system"] + results),
                back=cut(gave + [m.content for m in following if m.role == "tool"]),
                answered=cut([m.content for m in following if m.role != "tool"]),
            )
        )
        heard = following
        results = gave
    return all_turns


def speaker(step: Step) -> str:
    """The agent whose turn it is; `assistant` where no name was kept."""
    return step.completion.message.name or step.completion.message.role


def spoken(step: Step) -> str:
    """What it said, thought and called, cut to MAX_TEXT."""
    message = step.completion.message
    return cut([message.content, message.reasoning, *[call.arguments for call in message.tool_calls]])


def cut(texts: Sequence[str]) -> str:
    """One text of all that are not empty, without its middle where it is too long."""
    text = "\n".join(filter(None, texts))
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}\n{text[-MAX_TEXT // 2 :]}"
