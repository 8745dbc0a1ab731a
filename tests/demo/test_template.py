"""What `agentloop init` makes is complete: it loads, and its solutions pass its own verifiers."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentloop.config import load_config
from agentloop.demo.template import prepare_template
from agentloop.errors import ConfigError
from agentloop.gate.suite import load_suite
from agentloop.types import Split


def test_the_template_loads_with_three_disjoint_splits(tmp_path: Path) -> None:
    prepare_template(tmp_path / "p")
    config = load_config(tmp_path / "p")
    suite = load_suite(tmp_path / "p" / config.project.suite)
    files = {split: {task.id.rpartition("-")[2] for task in suite.split(split)} for split in Split}
    assert all(files.values())
    assert sum(map(len, files.values())) == len(set.union(*files.values()))
    assert config.gate.n_min <= len(suite.split(Split.heldout))


def test_the_same_template_has_the_same_suite_wherever_it_lies(tmp_path: Path) -> None:
    for name in ("one", "two"):
        prepare_template(tmp_path / name)
    assert len({load_suite(tmp_path / name / "evals" / "notes").hash for name in ("one", "two")}) == 1


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("a file", "is a file; name a folder"),
        ("a full folder", "is not empty and holds no agentloop project; name another folder"),
        ("a project", "holds a project already; `agentloop loop"),
    ],
)
def test_a_place_in_use_is_left_as_it_was(tmp_path: Path, made: str, words: str) -> None:
    place = tmp_path / "p"
    if made == "a file":
        place.write_text("mine")
    else:
        place.mkdir()
        (place / ("agentloop.toml" if made == "a project" else "diary")).write_text("mine")
    with pytest.raises(ConfigError, match=words):
        prepare_template(place)
    kept = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert kept == ["mine"]
