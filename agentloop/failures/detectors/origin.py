"""Where an answer came from: the first result that has its names and numbers, or the first agent that said them.

An answer that the verifiers did not accept came from somewhere. Nothing here knows whether that place is to blame.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from agentloop.failures.closing import closing
from agentloop.failures.reading import Call, Reading

N_WORDS = 12
"""Names and numbers of an answer that are traced."""
MAX_ANSWER = 300
"""Characters before the end of the last message that are its answer, where it does not say which they are."""
RESTATED = 0.6
"""Share of the task's words that a message has that repeats it."""
MAX_TEXT = 100_000
"""Characters of a result that are searched."""
STATED = re.compile(
    r"(?:\\boxed\{(?P<boxed>[^{}]{1,120})"
    r"|\b(?:final )?answer(?: to [^.:\n]{0,80})?\W{0,6}(?:is|was|would be|:|=)\W{0,4}(?P<value>[^\n]{1,120}))",
    re.IGNORECASE,
)
BOLD = re.compile(r"\*\*(?P<value>[^*\n]{1,80})\*\*")
WORD = re.compile(r"\d[\d,]*(?:\.\d+)?%?|[^\W\d_][\w'-]+")
COMMON = frozenset(
    {
        *("the", "this", "that", "these", "those", "there", "therefore", "thus", "hence", "however", "based", "after"),
        *("before", "when", "while", "since", "for", "from", "with", "and", "but", "not", "yes", "no", "here", "his"),
        *("her", "its", "our", "your", "they", "their", "you", "we", "it", "if", "in", "on", "at", "as", "by", "to"),
        *("of", "or", "so", "an", "is", "are", "was", "were", "final", "answer", "please", "let", "now", "next"),
        *("first", "second", "result", "results", "terminate", "note", "given", "which", "what", "who", "how", "true"),
        *("false", "none", "sorry"),
    }
)
"""Words that begin a sentence: their capital says nothing."""


class Origin(NamedTuple):
    """Where an answer was first."""

    step: int
    text: str
    at: int
    """Place in the text."""
    act: Call | None
    """What gave it; None where an agent said it and no tool had given it."""


def origin_of(reading: Reading) -> Origin | None:
    """None where no tool gave anything, or the answer has no names and numbers that the task does not have."""
    results = [act for act in reading.acts if act.ok and act.text]
    words = answer_words(reading)
    if not words or not results:
        return None
    best = max(results, key=lambda act: sum(has(act.text, word) for word in words))
    word = next((word for word in words if has(best.text, word)), None)
    if word is not None:
        return Origin(best.step, best.text, place(best.text, word), best)
    for step in reading.trace.steps:
        text = step.completion.message.content
        at = next((at for word in words if (at := place(text, word)) >= 0), -1)
        if at >= 0:
            return Origin(step.index, text, at, None)
    return None


def answer_words(reading: Reading) -> list[str]:
    """Names and numbers of the answer that the task does not have, in order."""
    last = closing(reading.trace)
    answer = reading.trace.answer or (last.text or "\n".join(last.calls) if last is not None else "")
    stated = [*STATED.finditer(answer)] or [*BOLD.finditer(answer)]
    text = answer[-MAX_ANSWER:]
    if stated:
        text = next((group for group in stated[-1].groups() if group), "")
    question = "\n".join(message.content for message in reading.trace.messages)
    words = (match[0] for match in WORD.finditer(text))
    named = (word for word in words if word.lower() not in COMMON and not word.islower())
    plan = restated(reading, question)
    new = (w for w in dict.fromkeys(named) if not has(question, w) and (w[0].isdigit() or not has(plan, w)))
    return [word for word in new if len(word) > 1 or stated][:N_WORDS]


def restated(reading: Reading, question: str) -> str:
    """The first message where it repeats the task, as a manager's plan does: its headings are no part of an answer."""
    first = next((step.completion.message.content for step in reading.trace.steps), "")
    words = set(question.lower().split())
    if words and len(words & set(first.lower().split())) >= RESTATED * len(words):
        return first
    return ""


def facts(text: str) -> list[str]:
    """Names and numbers of a text, in order: words with a digit or a capital letter, but common words."""
    words = (match[0] for match in WORD.finditer(text[:MAX_TEXT]))
    return [word for word in words if not word.islower() and word.lower() not in COMMON and len(word) > 1]


def has(text: str, word: str) -> bool:
    """Whether a word, a number or a phrase stands in a text, not as a part of another."""
    return place(text, word) >= 0


def place(text: str, word: str) -> int:
    """Where it stands; -1 where it does not."""
    if not word or word not in text[:MAX_TEXT]:
        return -1
    match = re.search(rf"(?<![\w.]){re.escape(word)}(?![\w]|\.\d)", text[:MAX_TEXT])
    return match.start() if match else -1
