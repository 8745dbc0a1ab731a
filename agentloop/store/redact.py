"""Removes secrets before storage: known values, known formats, and long words that look random.

Each secret is replaced by `[redacted:<kind>:<12 hex>]`. The hex digits are an HMAC-SHA256 with a key of the store, so
equal secrets can be matched without being revealed. It does not find secrets without a recognisable format, such as a
short password in plain text or a name, nor a secret that was split over two strings or encoded again. Redactors of
other packages (`redactors.py`) run last.
"""

from __future__ import annotations

import hmac
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from agentloop.store.redactors import outside_redactors

MIN_KNOWN = 8
"""Minimum length of a known secret in characters. A shorter one would occur in ordinary text."""
RANDOM = 32
MAX_RANDOM = 200
"""Maximum length of a word that is tested for randomness. A longer one is data, such as an image."""

_IN_WORD = bytes(97 if chr(c).isascii() and (chr(c).isalnum() or chr(c) in "+/_=-") else 32 for c in range(256))
"""Maps characters that a secret can contain to `a`, and all others to a space."""
_LONG_WORD = b"a" * 20
_START = r"(?<![A-Za-z0-9])"
_ESCAPE = re.compile(r"u[0-9a-fA-F]{4}|[nrtbf/]")
_TOKEN = re.compile(
    _START + r"(?:"
    r"(?P<aws>(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9]))"
    r"|(?P<github>gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{22,})"
    r"|(?P<anthropic>sk-ant-[A-Za-z0-9_-]{16,})"
    # A digit is required, because names such as `task-sk-learn-feature-extraction` have none.
    r"|(?P<openai>sk-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{20,})"
    r"|(?P<slack>(?:xox[abceoprs]|xapp)-(?=[A-Za-z-]*[0-9])[A-Za-z0-9-]{12,})"
    r"|(?P<google>AIza[A-Za-z0-9_-]{35}|GOCSPX-[A-Za-z0-9_-]{20,})"
    r")"
)
_SHAPE = re.compile(rb"A[KSBC][IC]A|gh[pousr]_|github_pat_|sk-|xox|xapp-|AIza|GOCSPX-|eyJ")
"""Matches everything that _TOKEN and _JWT match, and is faster."""
_JWT = re.compile(r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}")
# A key without its end line counts as well, as far as base64 goes: output is often cut off. At most 20,000 characters,
# so that an unclosed mark does not make the search quadratic.
_PEM = re.compile(
    r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"
    r"(?:[^\"']{0,20000}?-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|(?:\\+[nr]|[A-Za-z0-9+/=\s])*)"
)
# The lookahead leaves a password that was redacted before unchanged: stored text may be redacted again.
_URL = re.compile(r"(://[^\s:/@\"'<>\[]*:)(?!\[redacted:)([^\s/@\"'<>\\]+)(?=@)")
# A digit is required: prose has `bearer` before ordinary words.
_BEARER = re.compile(r"(?i)(bearer\s+)(?=[A-Za-z._~+/=-]*[0-9])([A-Za-z0-9._~+/=-]{16,})")

_HEX = re.compile(r"[0-9a-fA-F_=+/-]+")
# Hashes of lock files, public SSH keys, and the ids of answers and calls: random, but no secrets, and needed to join.
_NOT_SECRET = re.compile(r"(?:sha\d+[-=]|AAAA[BCE]3|chatcmpl-|toolu_|call[_-]|msg_|resp_|req_|run[_-]|rs_|fc_|gen-)")
_LINE = re.compile(r"[A-Za-z0-9+/_=-]+")
_LINE_OF_BASE64 = re.compile(r"(?:\s|\\+[nr])+[A-Za-z0-9+/]{16,}")


class Redactor:
    """Finds secrets. `key` is the key of their hashes. Threads may share it."""

    def __init__(self, key: bytes, secrets: Iterable[str] = ()) -> None:
        """secrets: known values, such as those of environment variables. Values shorter than MIN_KNOWN are ignored."""
        self._key = key
        self._outside = outside_redactors()
        # Longest first, so that a secret that contains another one is replaced as a whole.
        values = sorted({secret for secret in secrets if len(secret) >= MIN_KNOWN}, key=len, reverse=True)
        # Also in the spellings of JSON: a string may contain JSON, and `_suspicious` searches JSON before it is parsed.
        forms = {
            form
            for secret in values
            for form in (secret, *(json.dumps(secret, ensure_ascii=a)[1:-1] for a in (False, True)))
        }
        self._forms = tuple(sorted(forms, key=len, reverse=True))
        self._raw_forms = tuple(form.encode(errors="replace") for form in self._forms)

    def json(self, data: bytes) -> bytes:
        """`data` without secrets: the same bytes if it contains none, and valid JSON if it was valid."""
        if not self._suspicious(data):
            return data
        try:
            value = json.loads(data)
            clean = self._walk(value)
        except (ValueError, RecursionError):
            return self.text(data.decode(errors="replace")).encode()
        if clean is value:
            return data
        try:
            return json.dumps(clean, ensure_ascii=False, separators=(",", ":")).encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 cannot encode and an escape can
            return json.dumps(clean, separators=(",", ":")).encode()

    def text(self, text: str) -> str:
        """`text` without secrets; the same object if it contains none."""
        clean = text
        for form in self._forms:
            if form in clean:
                clean = clean.replace(form, self._mark("known", form))
        if "-----BEGIN" in clean:
            clean = _PEM.sub(lambda m: self._mark("private_key", m[0]), clean)
        if "eyJ" in clean:
            clean = _JWT.sub(lambda m: self._mark("jwt", m[0]), clean)
        if "://" in clean and "@" in clean:
            clean = _URL.sub(lambda m: m[1] + self._mark("password", m[2]), clean)
        if "earer" in clean or "EARER" in clean:
            clean = _BEARER.sub(lambda m: m[1] + self._mark("bearer", m[2]), clean)
        clean = self._words(clean)
        for redactor in self._outside:
            clean = redactor.text(clean)
        return text if clean == text else clean

    def _words(self, text: str) -> str:
        """`text` with random long words replaced."""
        pieces: list[str] = []
        at = 0
        for start, end in _long_words(text.encode("latin-1", errors="replace")):  # a byte for each character
            pieces += text[at:start], self._judge(text, start, end)
            at = end
        return "".join((*pieces, text[at:])) if pieces else text

    def _suspicious(self, data: bytes) -> bool:
        """True if JSON is worth parsing. It never misses a secret and has few false alarms.

        Words are tested as written, which equals their value except where an escape stands for a letter.
        """
        # Nothing is known about what redactors of other packages look for.
        if self._outside:
            return True
        if b"earer" in data or b"EARER" in data or (b"@" in data and b"://" in data):
            return True
        # An escape may spell a letter of a secret, so the bytes do not show it.
        if b"\\" in data and (b"\\u" in data or b"\\/" in data):
            return True
        for form in self._raw_forms:
            if form in data:
                return True
        words = list(_long_words(data))
        if not words:
            return False
        if b"-----BEGIN" in data or _SHAPE.search(b" ".join([data[start:end] for start, end in words])):
            return True
        text = data.decode("latin-1")
        return any(_is_random(text, _begin(text, start, end), end) for start, end in words if end - start >= RANDOM)

    def _walk(self, value: Any) -> Any:
        """`value` with clean strings; the same object if nothing was replaced."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            clean = [self._walk(item) for item in value]
            return value if all(a is b for a, b in zip(clean, value, strict=True)) else clean
        if isinstance(value, dict):
            pairs = [(self.text(key), self._walk(item)) for key, item in value.items()]
            same = all(a is b and c is d for (a, c), (b, d) in zip(pairs, value.items(), strict=True))
            return value if same else dict(pairs)
        return value

    def _judge(self, text: str, start: int, end: int) -> str:
        """The replacement of one long word, or the word itself."""
        begins = _begin(text, start, end)
        word = text[begins:end]
        clean = _TOKEN.sub(lambda m: self._mark(m.lastgroup or "token", m[0]), word)
        if clean == word and _is_random(text, begins, end):
            clean = self._mark("entropy", word)
        return text[start:begins] + clean

    def _mark(self, kind: str, secret: str) -> str:
        # Keyed: without the key of the store, nobody can test a guess of a short secret against the digits.
        digest = hmac.digest(self._key, secret.encode(errors="surrogatepass"), "sha256")
        return f"[redacted:{kind}:{digest.hex()[:12]}]"


def _long_words(data: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of words of at least 20 characters; six times as fast as a regular expression."""
    marks = data.translate(_IN_WORD)
    start = marks.find(_LONG_WORD)
    while start >= 0:
        end = marks.find(b" ", start)
        end = len(marks) if end < 0 else end
        yield start, end
        start = marks.find(_LONG_WORD, end)


def _begin(text: str, start: int, end: int) -> int:
    """Start of a word that may be in JSON: the character after a backslash is not part of it."""
    escape = _ESCAPE.match(text, start, end) if text.endswith("\\", 0, start) else None
    return escape.end() if escape else start


def _is_random(text: str, start: int, end: int) -> bool:
    """True if a word of at least 32 characters was generated at random, and is not a hash, UUID, path, name or line of
    data.

    In random words, upper case, lower case and digits alternate; in human text they come in runs.
    """
    word = text[start:end].rstrip("=")
    if not RANDOM <= len(word) <= MAX_RANDOM or _HEX.fullmatch(word) or _NOT_SECRET.match(word):
        return False
    # `h1:` begins a hash in go.sum, `base64,` the data of a URL.
    if text.endswith(("h1:", "base64,"), 0, start):
        return False
    if len(word) >= 60 and (_LINE_OF_BASE64.match(text, end) or _is_last_line(text, start)):
        return False
    kinds = [_kind_of(character) for character in word]
    turns = sum(a != b for a, b in pairwise(kinds) if "-" not in (a, b))
    if kinds.count("d") < 2 or kinds.count("l") + kinds.count("u") < 4 or kinds.count("-") > len(word) // 6:
        return False
    return turns >= 0.3 * len(word) and _bits(word) >= 3.7


def _kind_of(character: str) -> str:
    """d: digit, u: upper case, l: lower case, -: anything else."""
    if character.isdigit():
        return "d"
    if character.isupper():
        return "u"
    if character.islower():
        return "l"
    return "-"


def _is_last_line(text: str, start: int) -> bool:
    before = text[max(0, start - 100) : start].rstrip("\\nr\n ")
    return len(before) >= 60 and _LINE.fullmatch(before[-60:]) is not None and "\n" in text[max(0, start - 2) : start]


def _bits(word: str) -> float:
    """Shannon entropy in bits per character."""
    return -sum(n / len(word) * math.log2(n / len(word)) for n in Counter(word).values())
