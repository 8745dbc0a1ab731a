"""The last thing that an agent said which is more than a word that ends or hands over the run."""

from __future__ import annotations

import re
from typing import NamedTuple

from agentloop.types import Step, Trace

ENDS = re.compile(
    r"\W*(?:(?:terminate|done|finish(?:ed)?|exit|quit|end|stop|complete[d]?|over|ok(?:ay)?|yes|bye|goodbye|thanks?"
    r"|thank you|task (?:is )?(?:done|completed?|finished)"
    r"|no further (?:action|steps?)(?: (?:is|are) (?:needed|required))?"
    r"|next|continue|proceed|hand ?off|transfer|[a-z_]+ ?# ?#?stop#* ?|stop#*)\W*){1,3}",
    re.IGNORECASE,
)
"""A message that is nothing but such words says nothing of the work."""
HANDS_IN = re.compile(r"submit|finish|final|answer|complete|terminate|done", re.IGNORECASE)
BY_COMMAND = re.compile(r"submit|complete_task|task_complete|final_output", re.IGNORECASE)
"""Words of a shell command that hands in the work."""
SAYS_COMPLETE = re.compile(r"\btask_?complete\W{1,4}true", re.IGNORECASE)


class Closing(NamedTuple):
    """The last step that says or does something."""

    step: int
    text: str
    calls: tuple[str, ...]
    """Arguments of its calls."""
    hands_in: bool
    """One of its calls hands in the work, or its words say that the task is complete."""


def closing(trace: Trace) -> Closing | None:
    """None for a trace that says nothing at all."""
    for step in reversed(trace.steps):
        if not is_empty(step):
            message = step.completion.message
            hands_in = any(HANDS_IN.search(c.name) or BY_COMMAND.search(c.arguments) for c in message.tool_calls)
            calls = tuple(call.arguments for call in message.tool_calls)
            text = message.content if message.content.strip() else ""
            return Closing(step.index, text, calls, hands_in or bool(SAYS_COMPLETE.search(text[-2000:])))
    return None


def blamable(trace: Trace) -> list[bool]:
    """Of each step, whether it may be named as the one that decided: one that says nothing of the work may not."""
    return [not is_empty(step) for step in trace.steps]


def is_empty(step: Step) -> bool:
    """True for a step without a call that says nothing, or nothing but that the run is over or handed on."""
    message = step.completion.message
    if message.tool_calls:
        return False
    text = message.content if message.content.strip() else message.reasoning
    return not text.strip() or (len(text) < 80 and ENDS.fullmatch(text.strip()) is not None)
