"""Detectors of the group `plan`: the same again without anything new."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

from agentloop.failures.detectors.detector import LIKELY, Finding, detector
from agentloop.failures.reading import Reading
from agentloop.types import FailureType

N_EQUAL = 3
MAX_CYCLE = 4
"""Calls of a cycle that is told once, and not once for each call in it."""
MIN_WORDS = 40
"""Characters of a message from which saying it thrice is no mere courtesy."""


@detector("repetition", FailureType.plan_repetition)
def repetition(reading: Reading) -> Iterator[Finding]:
    """Three or more equal calls with equal results, anywhere in the trace; the step is the third one's.

    Where results were not written down, equal arguments or their equal hashes are a candidate. A cycle is
    told once, by its first call that comes a third time.
    """
    if len(reading.acts) < N_EQUAL:
        return
    counts: Counter[tuple[str, str, str, bool]] = Counter()
    last_report = -MAX_CYCLE - 1
    for place, act in enumerate(reading.acts):
        if act.call is None or (act.result is None and not (reading.by_words and act.call.arguments.strip(" {}"))):
            continue
        key = (act.name, canonical(act.call.arguments), act.text, act.failed)
        counts[key] += 1
        if counts[key] == N_EQUAL:
            if place - last_report >= MAX_CYCLE or not reading.by_words:
                sure = 1.0 if act.text or not reading.by_words else LIKELY
                yield Finding(act.step, (act.call.arguments, act.text, act.name), sure)
            last_report = place


@detector("same_words", FailureType.plan_repetition, version="1", min_precision=0.7)
def same_words(reading: Reading) -> Iterator[Finding]:
    """A foreign agent said the same, without a call, three times: told once each, as a candidate."""
    if not reading.by_words:
        return
    counts: Counter[tuple[str | None, str]] = Counter()
    for step in reading.trace.steps:
        message = step.completion.message
        if message.tool_calls or step.copied or len(message.content) < MIN_WORDS:
            continue
        key = (message.name, message.content.strip())
        counts[key] += 1
        if counts[key] == N_EQUAL:
            yield Finding(step.index, (message.content,), LIKELY)


def canonical(arguments: str) -> str:
    """Equal for JSON texts that differ only in key order or spacing; other text stands for itself."""
    if not arguments or arguments[0] not in ' {["\n\t':
        return arguments
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
