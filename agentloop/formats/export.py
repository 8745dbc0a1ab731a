"""Traces out of the store into files that others read: which there are, and how one is written whole or not at all.

A format is a class that fits `protocols.Exporter`, entered in `agentloop.exporters`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO

from agentloop.errors import ConfigError, did_you_mean
from agentloop.plugins import installed, load_part
from agentloop.protocols import Exporter, Stored

GROUP = "exporters"
DEFAULT = "jsonl"


def load_exporter(name: str | None, out: Path | None = None) -> Exporter:
    """The format of that name, or else the one that the name of `out` ends like. Raises ConfigError for none.

    A name that ends like nothing is DEFAULT.
    """
    names = sorted(installed(GROUP))
    if name is None and out is not None and (ending := out.suffix.lstrip(".")):
        if ending not in names:
            raise ConfigError(f"{out}: no format is called {ending!r}; say which with --format ({', '.join(names)})")
        name = ending
    name = name or DEFAULT
    if name not in names:
        raise ConfigError(f"no format {name!r} (known: {', '.join(names)}){did_you_mean(name, names)}")
    exporter: Exporter = load_part(GROUP, name)
    return exporter


def save(exporter: Exporter, traces: Iterable[Stored], out: Path) -> int:
    """Write a file, or a folder of them, that is there only when it is whole; its bytes.

    A file takes the place of one that was there. Raises ConfigError for a folder that is there and not empty.
    """
    if exporter.one_each:
        return _save_folder(exporter, traces, out)
    if out.is_dir():
        raise ConfigError(f"{out} is a folder; --out needs the name of a file")
    if out.exists() and not out.is_file():  # a device or a pipe, which nothing may take the place of
        with out.open("wb") as file:
            return _copy(exporter.write(traces), file)
    with _part_of(out) as part, part.open("xb") as file:
        n = _copy(exporter.write(traces), file)
        file.flush()
        os.fsync(file.fileno())
    return n


def _save_folder(exporter: Exporter, traces: Iterable[Stored], out: Path) -> int:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} is there already; --out needs the name of a new folder for {exporter.name}")
    n = 0
    with _part_of(out) as part:
        part.mkdir()
        for stored in traces:
            with _new_file(part, str(stored.facts["id"]), exporter.suffix) as file:
                n += _copy(exporter.write([stored]), file)
    return n


@contextmanager
def _part_of(out: Path) -> Iterator[Path]:
    """A name beside `out` that becomes `out` when the block has ended well, and nothing when it has not."""
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent}: no such folder; make it, or name another with --out")
    try:
        yield part
        part.replace(out)
    except BaseException:
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink(missing_ok=True)
        raise


def _new_file(folder: Path, name: str, suffix: str) -> IO[bytes]:
    """A file called like its trace. Traces of two projects may have the same id, and an id may be no file's name."""
    plain = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII).lstrip(".") or "trace"
    for n in count():
        try:
            return (folder / (f"{plain}-{n}{suffix}" if n else f"{plain}{suffix}")).open("xb")
        except FileExistsError:
            continue
    raise AssertionError


def _copy(parts: Iterable[bytes], file: IO[bytes]) -> int:
    return sum(file.write(part) for part in parts)
