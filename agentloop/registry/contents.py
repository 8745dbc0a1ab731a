"""What the folder of a version holds, for commands that compare and export versions. Nothing here acts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from agentloop.config.layout import artifact_folder
from agentloop.errors import ConfigError
from agentloop.types import Overlay, PolicyVersion

VERSION_FILE = "version.json"
OVERLAY = "overlay.json"
LINEAGE = "lineage.jsonl"
RESTORE = "bring back what was there"


class Contents(NamedTuple):
    """The words and numbers of one version."""

    settings: dict[str, str]
    """`policy.model` -> value as JSON; empty for a version that keeps no settings."""
    overlay: Overlay
    """Empty for a version of another kind."""
    trace_ids: tuple[str, ...]
    """Traces that it was made from."""


def read_contents(version: PolicyVersion, project: Path) -> Contents:
    """Of a version of the project in a folder; a version without a folder has none. Raises ConfigError."""
    if version.artifact is None:
        return Contents({}, Overlay(), ())
    folder = artifact_folder(project, version.artifact)
    if not folder.is_dir():
        raise ConfigError(f"v{version.number} has no folder {folder}; {RESTORE}")
    settings: dict[str, str] = {}
    overlay = Overlay()
    pairs: list[list[str]] = []
    try:
        if (folder / VERSION_FILE).is_file():
            settings = dict(_flat(json.loads((folder / VERSION_FILE).read_bytes())))
        if (folder / OVERLAY).is_file():
            overlay = Overlay.model_validate_json((folder / OVERLAY).read_bytes())
        if (folder / LINEAGE).is_file():
            pairs = [json.loads(line) for line in (folder / LINEAGE).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        words = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise ConfigError(f"{folder}: cannot be read ({words}); {RESTORE}") from None
    return Contents(settings, overlay, tuple(trace_id for trace_id, _ in pairs))


def _flat(value: Any, place: str = "") -> list[tuple[str, str]]:
    if not isinstance(value, dict):
        return [(place, json.dumps(value, ensure_ascii=False, sort_keys=True))]
    rows: list[tuple[str, str]] = []
    for key, item in value.items():
        rows += _flat(item, f"{place}.{key}" if place else str(key))
    return rows
