"""Packages outside the engine, installed for one test: the modules and their metadata in folders on `sys.path`."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

RESEARCH_FORMATS = Path(__file__).parents[1] / "benchmarks" / "research_formats"
"""Five formats of published research data, in the group `agentloop.formats`."""


def install(package: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `pip install --editable` does it, without pip: `site` gets the metadata that `pyproject.toml` declares.

    package: the folder of that file. site: an empty folder. Both folders leave `sys.path` when the test ends.
    """
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, parts in project["entry-points"].items():
        lines.append(f"[{group}]")
        lines += [f"{name} = {part}" for name, part in parts.items()]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.syspath_prepend(str(site))
