"""Records that are broken in one place each, for tests that nothing but a FormatError comes of them."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHARED = Path(os.environ.get("AGENTLOOP_SHARED", Path(__file__).parents[3] / "shared")) / "data" / "traces"
"""Real files of each format, where somebody has them."""


def broken(record: Any) -> Iterator[Any]:
    """`record` with each value below it in turn removed, and set to what it should not be."""
    for path in _paths(record):
        for value in (None, 1, "x", [], {}, [None]):
            yield _changed(record, path, value)
        yield _removed(record, path)


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (key,)
        yield from ((key, *path) for path in _paths(item))


def _changed(record: Any, path: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(record)
    _parent(made, path)[path[-1]] = value
    return made


def _removed(record: Any, path: tuple[Any, ...]) -> Any:
    made = copy.deepcopy(record)
    del _parent(made, path)[path[-1]]
    return made


def _parent(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        value = value[key]
    return value
