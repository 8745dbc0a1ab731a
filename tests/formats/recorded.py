"""What the tests of the formats share: reading a record, breaking it everywhere, and the real sample files."""

from __future__ import annotations

import copy
import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentloop.errors import FormatError
from agentloop.formats.importing import load_formats
from agentloop.formats.source import Source
from agentloop.protocols import Format
from agentloop.types import Imported

SHARED = Path(os.environ.get("AGENTLOOP_SHARED", Path(__file__).parents[3] / "shared")) / "data" / "traces"
WRONG: tuple[Any, ...] = (None, 1, "x", [], {})


def written(tmp_path: Path, record: object, name: str = "run.json") -> Source:
    path = tmp_path / name
    path.write_text(json.dumps(record))
    return Source(path)


def one(form: Format, tmp_path: Path, record: object) -> Imported:
    (found,) = form.read(written(tmp_path, record))
    assert isinstance(found, Imported), found
    return found


def mutations(record: Any) -> Iterator[Any]:
    """The record with each of its keys and items in turn removed, or replaced by each wrong value."""
    for path in list(_paths(record)):
        for wrong in (*WRONG, KeyError):
            broken = copy.deepcopy(record)
            below = broken
            for key in path[:-1]:
                below = below[key]
            if wrong is KeyError:
                del below[path[-1]]
            else:
                below[path[-1]] = wrong
            yield broken


def survives(form: Format, tmp_path: Path, record: Any) -> None:
    """Nothing but Imported or FormatError comes of any mutation."""
    n = 0
    for broken in mutations(record):
        source = written(tmp_path, broken)
        form.recognises(source)
        for found in form.read(source):
            assert isinstance(found, Imported | FormatError)
        n += 1
    assert n > 50
    text = json.dumps(record)
    deep = "[" * 900 + "]" * 900
    for hostile in (
        text.replace("a", "\\ud800", 1),
        text.replace("1", "1e999"),
        text.replace("1", "1" + "0" * 400),
        text.replace('"content": "', f'"deep": {deep}, "content": "', 1),
    ):
        source = written(tmp_path, None)
        source.path.write_text(hostile)
        try:
            form.recognises(source)
            assert all(isinstance(found, Imported | FormatError) for found in form.read(source))
        except FormatError:
            pass


def files(folder: str) -> list[Path]:
    """The sample files of a folder; none when they are not there."""
    if not (SHARED / folder).is_dir():
        return []
    found = sorted(path for path in (SHARED / folder).rglob("*") if path.is_file())
    return [path for path in found if path.name not in ("README.md", "LICENSE")]


def plain(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def recognising(path: Path) -> list[str]:
    """Names of the installed formats that claim a file."""
    source = Source(path)
    return [name for name, form in load_formats().items() if form.recognises(source)]


def counts(found: list[Imported]) -> tuple[int, int, int]:
    """Steps, tool calls, results of tool calls."""
    steps = [step for item in found for step in item.trace.steps]
    calls = sum(len(step.completion.message.tool_calls) for step in steps)
    return len(steps), calls, sum(len(step.results) for step in steps)


def imported(form: Format, path: Path) -> list[Imported]:
    found = list(form.read(Source(path)))
    errors = [str(item) for item in found if isinstance(item, FormatError)]
    assert not errors
    return [item for item in found if isinstance(item, Imported)]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in below:
        yield (*path, key)
        yield from _paths(item, (*path, key))
