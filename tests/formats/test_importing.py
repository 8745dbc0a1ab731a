"""Folders of files of any kind: what is imported, skipped and failed, and what is said of it."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentloop.errors import ConfigError, FormatError
from agentloop.formats.chat import ChatFormat
from agentloop.formats.importing import load_formats, recognise, take, walk
from agentloop.formats.source import Source
from agentloop.protocols import Records
from agentloop.types import Imported

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "mood": "good"}]}


class Greedy:
    """Claims every file that is JSON."""

    name = "greedy"

    def recognises(self, source: Records) -> bool:
        return bool(source.head)

    def read(self, source: Records) -> Iterator[Imported | FormatError]:
        raise FormatError(f"{source.name}: nothing")
        yield


class Shelf:
    """A store of ids."""

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.sizes: list[int] = []

    def put(self, items: Sequence[Imported]) -> int:
        new = {item.trace.id for item in items} - self.ids
        self.ids |= new
        self.sizes.append(len(items))
        return len(new)


def write(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records))
    return path


def test_a_folder_is_imported_and_a_second_time_nothing_is_new(tmp_path: Path) -> None:
    write(tmp_path / "a" / "one.jsonl", CHAT, '{"messages": [', {**CHAT, "id": 2})
    write(tmp_path / "b" / "two.json", CHAT)
    (tmp_path / "b" / "three.jsonl.gz").write_bytes(gzip.compress(json.dumps({**CHAT, "id": 3}).encode()))
    write(tmp_path / "notes.md", "# notes")
    write(tmp_path / "cut.json", '{"messages": [{"role"')
    write(tmp_path / "other.json", {"something": "else"})
    shelf = Shelf()
    account = take(walk([tmp_path]), {"chat": ChatFormat(), "none": _Never()}, shelf.put)
    assert (account.imported, account.known, account.skipped, account.failed) == (3, 1, 2, 2)
    chat = account.by_format["chat"]
    assert (chat.files, chat.imported, chat.failed) == (3, 3, 1)
    assert dict(chat.lost) == {"messages[].mood": 4, "id": 2}
    said = "\n".join(account.reasons)
    for words in ("one.jsonl: line 2: no JSON", "cut.json: no JSON", "other.json: no known format", "notes.md"):
        assert words in said
    again = take(walk([tmp_path]), {"chat": ChatFormat(), "none": _Never()}, shelf.put)
    assert (again.imported, again.known) == (0, 4)


def test_two_claims_are_told_and_the_option_decides(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", CHAT)
    both = {"chat": ChatFormat(), "greedy": Greedy()}
    with pytest.raises(FormatError, match="could be chat or greedy; say which with --format"):
        recognise(Source(path), both)
    assert take([path], {"chat": ChatFormat()}, Shelf().put).imported == 1


@pytest.mark.parametrize(
    "broken", [None, [], "x", {}, {"messages": 5}, {"messages": []}, {"mesages": CHAT["messages"]}]
)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_broken_record_at_the_beginning_does_not_hide_the_others(tmp_path: Path, broken: Any, at: int) -> None:
    records: list[Any] = [{**CHAT, "id": n} for n in range(3)]
    path = write(tmp_path / "x.jsonl", *records[:at], json.dumps(broken), *records[at:])
    account = take([path], load_formats(), Shelf().put)
    assert (account.imported, account.failed, account.skipped) == (3, 1, 0)
    assert re.search(rf"x\.jsonl: (line|trace) {at + 1}: ", account.reasons[0])


def test_a_file_of_which_no_line_can_be_read_is_broken(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", '{"messages": [')
    account = take([path], load_formats(), Shelf().put)
    assert (account.failed, account.skipped) == (1, 0)
    assert "x.jsonl: line 1: no JSON" in account.reasons[0]
    assert take([write(tmp_path / "none.jsonl")], load_formats(), Shelf().put).skipped == 1


def test_many_traces_are_stored_in_parts(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", *({**CHAT, "id": n} for n in range(450)))
    shelf = Shelf()
    assert take([path], {"chat": ChatFormat()}, shelf.put).imported == 450
    assert shelf.sizes == [200, 200, 50]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        walk([tmp_path / "none"])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe: a pipe or device, .* save it first"):
        walk([tmp_path / "pipe"])
    assert walk([tmp_path]) == []
    with pytest.raises(ConfigError, match="did you mean 'chat'"):
        load_formats("chatt")


class _Never:
    name = "none"

    def recognises(self, source: Records) -> bool:
        return False

    def read(self, source: Records) -> Iterator[Imported | FormatError]:
        return iter(())
