"""Whether an instruction asks for a held-out task in other words.

Words are compared without case, order, endings and the commonest words. A parameter is a word with a digit, a path, a
file name, or a quoted word; `two` is `2`. An instruction with every parameter of a held-out one asks for the same task
in two cases: the two share at least half of the shorter one's other words, or its origin lacks one of these parameters.
For a held-out instruction without parameters the share is 0.7. Synonyms are not recognised; a check of the solution
covers them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

SHARE, SHARE_WITHOUT = 0.5, 0.7
"""Share of the shorter one's words from which two instructions are alike, with and without parameters."""
MIN_STEM = 3
_NUMERALS = "two three four five six seven eight nine ten eleven twelve"
NUMBERS = {word: str(n) for n, word in enumerate(_NUMERALS.split(), 2)}
"""Without `one`, which is rarely a number in an instruction."""
_COMMON = """
a an and any are as at be been by can do does each every for from give given gives had has have here how i if in into is
it its just let many me more most much my no not of on one only or our out please put say show so some submit such tell
than that the their them then there these they this those to us was we were what when where which who whose why will
with would you your answer report
"""
COMMON = frozenset(_COMMON.split())
_QUOTED = re.compile(r"[`\"“']([^`\"”'\s]+)[`\"”']")
_WORD = re.compile(r"[^\W_](?:[\w./:@+-]*\w)?")


class Words(NamedTuple):
    """An instruction as it is compared."""

    parameters: frozenset[str]
    others: frozenset[str]


def words_of(instruction: str) -> Words:
    """The parameters and the stems of the other words of a text."""
    text = instruction.casefold()
    parameters = set(_QUOTED.findall(text))
    others: set[str] = set()
    for word in _WORD.findall(text):
        number = NUMBERS.get(word, word)
        if number in parameters or any(not letter.isalpha() and letter != "-" for letter in number):
            parameters.add(number)
        elif word not in COMMON:
            others.add(_stem(word))
    return Words(frozenset(parameters), frozenset(others))


def is_like(variant: Words, held_out: Words, origin: Words) -> bool:
    """Whether `variant`, made of `origin`, asks for the task `held_out`."""
    if not held_out.parameters:
        return share(variant, held_out) >= SHARE_WITHOUT
    if not held_out.parameters <= variant.parameters:
        return False
    return not held_out.parameters <= origin.parameters or share(variant, held_out) >= SHARE


def share(one: Words, other: Words) -> float:
    """Share of the shorter text's words, without parameters, that the other has too; 1 if the shorter has none."""
    n = min(len(one.others), len(other.others))
    return len(one.others & other.others) / n if n else 1.0


def first_like(instruction: str, origin: str, held_out: Iterable[str]) -> str | None:
    """The first of the texts `held_out` that `instruction`, a variant of the text `origin`, asks for; None for none."""
    variant, before = words_of(instruction), words_of(origin)
    return next((text for text in held_out if is_like(variant, words_of(text), before)), None)


def _stem(word: str) -> str:
    """`word` without an ending of English grammar; the same for `counting`, `counted` and `counts`."""
    # Longer endings come first, because a word that ends in `ings` also ends in `s`.
    for ending in ("ings", "ing", "ies", "ied", "ers", "er", "es", "ed", "s", "e", "y"):
        if word.endswith(ending) and len(word) - len(ending) >= MIN_STEM:
            return word.removesuffix(ending)
    return word
