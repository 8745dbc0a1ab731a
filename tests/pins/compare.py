"""Two JSON documents -> the paths at which they differ; and the JSON files that pins are kept in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RECORD = ".venv/bin/python -m tests.pins.record"
MAX_SHOWN = 40
ABSENT = object()


def read(name: str) -> Any:
    """The pin of this name. Raises AssertionError where nobody has recorded one."""
    path = FOLDER / name
    assert path.is_file(), f"{path}: no such pin; make it with `{RECORD}`"
    return json.loads(path.read_text(encoding="utf-8"))


def write(name: str, document: object) -> Path:
    """Sorted, so that the difference of two records is small."""
    path = FOLDER / name
    path.write_text(json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def assert_same(pin: object, actual: object, what: str) -> None:
    """Raises AssertionError with the differing paths, and with the command that records the pin anew."""
    lines = list(differences(pin, actual))
    excerpt = [*lines[:MAX_SHOWN], *([f"and {len(lines) - MAX_SHOWN} more"] if len(lines) > MAX_SHOWN else [])]
    head = f"{what} differs from its pin in {len(lines)} places. If that is meant: {RECORD}"
    assert not lines, "\n  ".join([head, *excerpt])


def differences(pin: Any, actual: Any, path: str = "") -> Iterator[str]:
    """One line for each place: `path: pin -> actual`."""
    if isinstance(pin, dict) and isinstance(actual, dict):
        for key in sorted({*pin, *actual}):
            yield from differences(pin.get(key, ABSENT), actual.get(key, ABSENT), f"{path}.{key}" if path else key)
    elif isinstance(pin, list) and isinstance(actual, list):
        for index in range(max(len(pin), len(actual))):
            yield from differences(_at(pin, index), _at(actual, index), f"{path}[{index}]")
    elif type(pin) is not type(actual) or pin != actual:
        yield f"{path or 'document'}: {_shown(pin)} -> {_shown(actual)}"


def _at(values: list[Any], index: int) -> Any:
    return values[index] if index < len(values) else ABSENT


def _shown(value: Any) -> str:
    if value is ABSENT:
        return "nothing"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}…"
