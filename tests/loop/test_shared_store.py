"""Projects that share a store share no row: the same suite and seed, in one database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlmodel import col, select

from agentloop.errors import ConfigError
from agentloop.store.store import Store
from agentloop.store.tables import DecisionRow, EvalRow, PolicyRow, StageRow, TraceRow

from .mini import make_mini, opened, run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("bubblewrap")]

TABLES = (TraceRow, StageRow, PolicyRow, EvalRow, DecisionRow)
SKILLS = (1, 3)


@pytest.fixture
def shared(where: str | Path, monkeypatch: pytest.MonkeyPatch) -> str | Path:
    """A store that the environment names for every folder."""
    monkeypatch.setenv("AGENTLOOP_STORE__URL", str(where))
    return where


def project(folder: Path, name: str) -> Path:
    made = make_mini(folder / name, n_heldout=4)
    settings = made / "agentloop.toml"
    settings.write_text(settings.read_text().replace('name = "mini"', f'name = "{name}"'))
    return made


def rows(where: str | Path, name: str) -> dict[str, list[dict[str, Any]]]:
    """All rows of a project, by table."""
    store = Store(where, create=False)
    with store._database.session() as session:
        stored = {
            str(table.__tablename__): [
                row.model_dump() for row in session.exec(select(table).where(col(table.project) == name))
            ]
            for table in TABLES
        }
    store.close()
    return stored


def test_two_projects_with_the_same_suite_and_seed_share_no_row(tmp_path: Path, shared: str | Path) -> None:
    ann, bob = project(tmp_path, "ann"), project(tmp_path, "bob")
    run(ann, SKILLS)
    before = rows(shared, "ann")
    assert all(before.values()), "the loop leaves something in each table"
    run(bob, SKILLS)
    assert rows(shared, "ann") == before
    after = rows(shared, "bob")
    assert {name: len(each) for name, each in after.items()} == {name: len(each) for name, each in before.items()}
    ids = [{row[key] for row in each["trace"]} for each in (before, after) for key in ("id", "episode_id")]
    assert len(set.union(*ids)) == sum(map(len, ids)), "ids that we derive tell the projects apart"
    assert {row["seed"] for row in before["trace"]} == {row["seed"] for row in after["trace"]}, "and draw the same"
    assert rows(shared, "default") == {name: [] for name in before}
    assert not (ann / "traces" / "store.db").exists()


def test_a_folder_of_the_same_name_is_refused_unless_it_says_that_it_is_the_same(
    tmp_path: Path, shared: str | Path
) -> None:
    one, two = project(tmp_path / "a", "mini"), project(tmp_path / "b", "mini")
    run(one, SKILLS[:1])
    run(one, SKILLS[:1])
    with pytest.raises(ConfigError, match=r"another folder has project 'mini'; give .* \[store\] project"), opened(two):
        pass
    settings = two / "agentloop.toml"
    settings.write_text(f'{settings.read_text()}[store]\nproject = "mini"\n')
    with opened(two) as same:
        assert [version.number for version in same.registry.all()] == [1]
