"""Words of those who are graded, shown to a model as data.

What stands between the two marks is somebody else's; the marks carry a random number that is made
for one call, so nobody can have written it before. Every line within begins with `| `, so that not
even a mark of another number stands at the start of a line, and signs that a chat template or a
reader would take for structure are broken up. A model can still choose to obey what it reads: the
fence only sees to it that it cannot mistake whose words they are.
"""

from __future__ import annotations

import re
import secrets
import unicodedata
from typing import NamedTuple

LINE = "| "
MIN_QUOTE = 12
"""Characters without spaces, about three words, that a quote needs where its words stand in several places."""
MIN_SHORT = 4
"""Characters that a quote needs where its words stand in one place only, unless it is a whole line or answer."""
_SPACED = r"[0-9A-Za-z_\u00aa-\u024f\u0370-\u052f\u1e00-\u1fff]"
"""Digits and letters of Latin, Greek and Cyrillic. Chinese, Japanese and others put no spaces between their words."""
_TOKENS = re.compile(r"<(?=[|｜/]?[A-Za-z_｜|])|(?<=[|｜])>|\[(?=/?(?:INST|SYS)\b)", re.IGNORECASE)
"""Where a tag or a special token of a chat template begins or ends: `<|im_end|>`, `</s>`, `[/INST]`."""


class Fenced(NamedTuple):
    """A text between its marks."""

    text: str
    """With the marks, each on a line of its own."""
    inside: str
    """What stands between them, without what each line begins with: evidence is looked for in it."""
    mark: str


def fence(text: str, mark: str | None = None) -> Fenced:
    """`text` as data. mark: for a test; otherwise 96 random bits."""
    mark = mark or secrets.token_hex(12)
    inside = _visible("\n".join(text.splitlines()), mark)
    lines = "\n".join(f"{LINE}{line}" for line in inside.split("\n"))
    return Fenced(f"BEGIN {mark}\n{lines}\nEND {mark}", inside, mark)


def quoted(evidence: str, inside: str) -> bool:
    """True when `inside` has the words of `evidence`, however they are spaced and broken into lines."""
    words = _squashed("\n".join(line.removeprefix(LINE) for line in evidence.splitlines()))
    return bool(words) and words in _squashed(inside)


def identifies(evidence: str, inside: str) -> bool:
    """True when `inside` has the words of `evidence`, and they are enough to know which place is meant.

    Enough are MIN_QUOTE characters without spaces. Enough, too, are MIN_SHORT of them, a whole line or a whole text
    between quotation marks, where they stand in one place only. Part of a word is no place in scripts with spaces.
    """
    if not quoted(evidence, inside):
        return False
    words = _squashed("\n".join(line.removeprefix(LINE) for line in evidence.splitlines()))
    if len(words) >= MIN_QUOTE:
        return True
    pattern = r"\s*".join(map(re.escape, words))
    if re.match(_SPACED, words[0]):
        pattern = f"(?<!{_SPACED}){pattern}"
    if re.match(_SPACED, words[-1]):
        pattern = f"{pattern}(?!{_SPACED})"
    places = re.findall(pattern, inside)
    is_whole = words in map(_squashed, inside.splitlines()) or f'"{words}"' in _squashed(inside)
    return len(places) == 1 and (len(words) >= MIN_SHORT or is_whole)


def shortened(text: str, limit: int) -> str:
    """Head and tail of a text that is longer than `limit` characters, and how much was left out."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    return f"{text[:head]}\n[{len(text) - limit} characters left out]\n{text[len(text) - (limit - head) :]}"


def _visible(text: str, mark: str) -> str:
    """Without the mark, without what nobody sees, with tags and special tokens broken up."""
    seen = "".join(c for c in text if c in "\n\t" or not _hidden(c))
    while re.search(mark, seen, re.IGNORECASE):  # taking one out may make another
        seen = re.sub(mark, "", seen, flags=re.IGNORECASE)
    return _TOKENS.sub(lambda match: f"{match[0]} " if match[0] != ">" else " >", seen)


def _hidden(character: str) -> bool:
    """Control and format characters, lone surrogates, and the tag characters that spell text unseen."""
    return not " " <= character <= "~" and unicodedata.category(character)[0] == "C"


def _squashed(text: str) -> str:
    return "".join(text.split())
