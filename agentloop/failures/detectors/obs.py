"""Detectors of the group `obs`: the agent saw a result and misinterpreted it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from agentloop.failures.detectors.detector import Finding, detector
from agentloop.failures.reading import Reading
from agentloop.failures.reference import last_printed
from agentloop.failures.words import ADMITS, SUCCESS
from agentloop.types import FailureType

MAX_SAID = 4000
"""Maximum number of characters of a message that are searched for a claim or an admission."""


@detector("misread", FailureType.obs_misread)
def misread(reading: Reading) -> Iterator[Finding]:
    """The last successful call printed the reference answer, but the agent submitted another value.

    A submission that contains the printed value among other words was read correctly; it is only a wrong answer.
    """
    if not (reading.lost and reading.answer):
        return
    value = last_printed(reading)
    whole = r"(?<![\w.+-]){}(?!\w|\.\w)"  # -95 and 95.5 are other values than 95
    if not value or (value in reading.answer and re.search(whole.format(re.escape(value)), reading.answer)):
        return
    yield Finding(reading.last_step, (reading.trace.answer,))


@detector("error_ignored", FailureType.obs_error_ignored, version="1", min_precision=0.7)
def error_ignored(reading: Reading) -> Iterator[Finding]:
    """A call failed, and the next turn claims success without another call and without mentioning the error."""
    steps = reading.trace.steps
    if not steps:
        return
    places = {step.index: place for place, step in enumerate(steps)}
    last: dict[int, bool] = {}
    for act in reading.acts:
        last[act.step] = act.failed
    for index, failed in last.items():
        place = places[index] + 1
        if not failed or place >= len(steps):
            continue
        message = steps[place].completion.message
        if message.tool_calls or not SUCCESS.search(message.content, 0, MAX_SAID):
            continue
        if ADMITS.search(message.content, 0, MAX_SAID):
            continue
        yield Finding(steps[place].index, (message.content,), 0.7)
