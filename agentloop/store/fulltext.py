"""Full-text search over bodies: FTS5 in SQLite, tsvector with GIN in PostgreSQL, both in the table `body_text`.

A search finds traces with a body that contains all words; words quoted together must follow each other.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    bindparam,
    column,
    func,
    literal,
    literal_column,
    select,
    table,
)

from agentloop.store.statements import chunks, run

PART = 200_000
"""Maximum number of characters of one row in PostgreSQL, where a tsvector is limited to a megabyte."""

# Letters and digits in lower case, a space for any other byte: what unicode61 of FTS5 makes of ASCII.
_ASCII = bytes(ord(chr(c).lower()) if chr(c).isascii() and chr(c).isalnum() else ord(" ") for c in range(256))
_ACCENTS = re.compile("[\u0300-\u036f]")
_BETWEEN_WORDS = re.compile(r"[\W_]+")

CREATE_SQLITE = (
    # Without content: the bodies are already in `body`, compressed, so a removal must repeat the words
    # (`bodies.words`).
    "CREATE VIRTUAL TABLE body_text USING fts5(words, content='', tokenize='unicode61')",
    # Fewer merges than the default of 4: they are a third of the cost of a write.
    "INSERT INTO body_text(body_text, rank) VALUES ('automerge', 16)",
)
CREATE_POSTGRESQL = (
    "CREATE TABLE body_text (body_key BIGINT NOT NULL, words TSVECTOR NOT NULL)",
    "CREATE INDEX body_text_by_body ON body_text (body_key)",
    "CREATE INDEX body_text_words ON body_text USING gin (words)",
)


def add(connection: Connection, bodies: Sequence[tuple[int, str]]) -> None:
    """Indexes bodies by key and words."""
    if not bodies:
        return
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("INSERT INTO body_text(rowid, words) VALUES (?, ?)", list(bodies))
        return
    parts = [(key, part) for key, text in bodies for part in _parts(_folded(text))]
    for part in chunks(parts):
        rows = ", ".join(f"(${n}, to_tsvector('simple', ${n + 1}))" for n in range(1, 2 * len(part), 2))
        statement = f"INSERT INTO body_text VALUES {rows}"  # noqa: S608
        run(connection, statement, [value for row in part for value in row])


def remove(connection: Connection, bodies: Sequence[tuple[int, str]]) -> None:
    """Removes bodies from the index. The words must equal those that were added."""
    if not bodies:
        return
    if connection.dialect.name == "sqlite":
        statement = "INSERT INTO body_text(body_text, rowid, words) VALUES ('delete', ?, ?)"
        connection.exec_driver_sql(statement, list(bodies))
    else:
        connection.exec_driver_sql("DELETE FROM body_text WHERE body_key = %s", [(key,) for key, _ in bodies])


def matching(dialect: str, phrase: str) -> Select[tuple[int]]:
    """Keys of the bodies that contain the words of `phrase` one after another; none for a phrase without words."""
    index = table("body_text", column("body_key"), column("words"))
    if dialect == "sqlite":
        # Within quotes nothing is an operator of FTS5; a quote is written twice.
        quoted = '"' + phrase.replace('"', '""').replace("\0", " ") + '"'
        matches: ColumnElement[bool] = literal_column("body_text").op("MATCH")(literal(quoted))
        return select(literal_column("body_text.rowid")).select_from(index).where(matches)
    query = func.phraseto_tsquery(literal_column("'simple'::regconfig"), bindparam(None, _folded(phrase)))
    return select(index.c.body_key).where(index.c.words.op("@@")(query))


def _folded(text: str) -> str:
    """The words as FTS5 tokenises them, so that a filter finds the same in both databases.

    PostgreSQL's own parser keeps paths, addresses, host names and accents.
    """
    if text.isascii():  # thirty times as fast
        return text.encode().translate(_ASCII).decode()
    # unicode61 removes accents by default, so `café` and `cafe` are one word in both databases.
    text = unicodedata.normalize("NFC", _ACCENTS.sub("", unicodedata.normalize("NFD", text)))
    return _BETWEEN_WORDS.sub(" ", text).lower()


def _parts(text: str) -> list[str]:
    """Parts of at most PART characters, cut between words if possible."""
    parts = []
    while len(text) > PART:
        # The search for a space ends at half a part, so that each part makes progress.
        cut = text.rfind(" ", PART // 2, PART)
        cut = PART if cut < 0 else cut
        parts.append(text[:cut])
        text = text[cut:]
    return [*parts, text] if text.strip() else parts
