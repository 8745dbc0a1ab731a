"""Presents text from a graded agent to a model as data, not as instructions.

Text between the two marks comes from another party. The marks contain a random number that is drawn for each call, so
nobody can forge them in advance. Every line inside begins with `| `, so no forged mark can start a line. Tags and
special tokens that a chat template or a reader could take for structure are broken up. A model can still decide to obey
the text; the fence only guarantees that it knows whose words they are.
"""

from __future__ import annotations

import re
import secrets
import unicodedata
from typing import NamedTuple

LINE = "| "
MIN_QUOTE = 12
"""Minimum number of characters without spaces, about three words, of a quote whose words occur in several places."""
MIN_SHORT = 4
"""Minimum number of characters of a quote whose words occur in one place only, unless it is a whole line or answer."""
_SPACED = r"[0-9A-Za-z_\u00aa-\u024f\u0370-\u052f\u1e00-\u1fff]"
"""Digits and letters of Latin, Greek and Cyrillic. Chinese, Japanese and other scripts have no spaces between words."""
_TOKENS = re.compile(r"<(?=[|｜/]?[A-Za-z_｜|])|(?<=[|｜])>|\[(?=/?(?:INST|SYS)\b)", re.IGNORECASE)
"""Start and end of a tag or a special token of a chat template: `<|im_end|>`, `</s>`, `[/INST]`."""


class Fenced(NamedTuple):
    """A text between its marks."""

    text: str
    """The text with its marks, each on a line of its own."""
    inside: str
    """The text between the marks, without line prefixes. Quotes are checked against it."""
    mark: str


def fence(text: str, mark: str | None = None) -> Fenced:
    """`text` as data. mark: for tests; default: 96 random bits."""
    mark = mark or secrets.token_hex(12)
    # `splitlines` also breaks at U+2028 and the like, which a model may read as the start of a line without prefix.
    inside = _visible("\n".join(text.splitlines()), mark)
    lines = "\n".join(f"{LINE}{line}" for line in inside.split("\n"))
    return Fenced(f"BEGIN {mark}\n{lines}\nEND {mark}", inside, mark)


def quoted(evidence: str, inside: str) -> bool:
    """True if `inside` contains the words of `evidence`, with any spacing and line breaks."""
    # A model may copy the line prefix into a quote of several lines, although the instructions forbid it.
    words = _squashed("\n".join(line.removeprefix(LINE) for line in evidence.splitlines()))
    return bool(words) and words in _squashed(inside)


def identifies(evidence: str, inside: str) -> bool:
    """True if `inside` contains the words of `evidence`, and they are long enough to identify one place.

    MIN_QUOTE characters without spaces are long enough. So are MIN_SHORT characters, a whole line, or a whole text
    between quotation marks, if the words occur only once. In scripts with spaces, part of a word identifies no place.
    """
    if not quoted(evidence, inside):
        return False
    words = _squashed("\n".join(line.removeprefix(LINE) for line in evidence.splitlines()))
    if len(words) >= MIN_QUOTE:
        return True
    # `words` has no spaces, and the text has its own between any two of its characters.
    pattern = r"\s*".join(map(re.escape, words))
    if re.match(_SPACED, words[0]):
        pattern = f"(?<!{_SPACED}){pattern}"
    if re.match(_SPACED, words[-1]):
        pattern = f"{pattern}(?!{_SPACED})"
    places = re.findall(pattern, inside)
    is_whole = words in map(_squashed, inside.splitlines()) or f'"{words}"' in _squashed(inside)
    return len(places) == 1 and (len(words) >= MIN_SHORT or is_whole)


def shortened(text: str, limit: int) -> str:
    """Head and tail of a text that is longer than `limit` characters, with the number of omitted characters."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    return f"{text[:head]}\n[{len(text) - limit} characters left out]\n{text[len(text) - (limit - head) :]}"


def _visible(text: str, mark: str) -> str:
    """The text without the mark and without invisible characters, with tags and special tokens broken up."""
    seen = "".join(c for c in text if c in "\n\t" or not _hidden(c))
    while re.search(mark, seen, re.IGNORECASE):  # taking one out may make another
        seen = re.sub(mark, "", seen, flags=re.IGNORECASE)
    return _TOKENS.sub(lambda match: f"{match[0]} " if match[0] != ">" else " >", seen)


def _hidden(character: str) -> bool:
    """True for control and format characters, lone surrogates, and tag characters that spell invisible text."""
    return not " " <= character <= "~" and unicodedata.category(character)[0] == "C"


def _squashed(text: str) -> str:
    return "".join(text.split())
