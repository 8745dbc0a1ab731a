"""A store of every released schema opens, with everything in it; a newer one is left alone."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlmodel import SQLModel

from agentloop.errors import ConfigError, StoreError
from agentloop.store.store import Store
from agentloop.store.tables import SCHEMA_VERSION

from .old import at_schema, load_schema_4
from .rows import judged, version
from .span_rows import span
from .structure import migrated, structure

pytestmark = pytest.mark.slow

SCHEMA_1 = Path(__file__).with_name("schema_1.sql")
"""What the first release wrote, as SQLite dumps it."""
FULL_TEXT = "body_text"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    connection = sqlite3.connect(path)
    connection.executescript(SCHEMA_1.read_text())
    connection.close()
    return path


def test_a_new_file_has_the_tables_that_the_migrations_make(tmp_path: Path) -> None:
    Store(tmp_path / "new.db").close()
    assert structure(tmp_path / "new.db") == migrated(tmp_path / "migrated.db"), (
        "run `python -m tests.pins.record structure`"
    )


def test_stages_of_schema_4_get_their_kind_version_and_suite(tmp_path: Path) -> None:
    """The same by another suite is not taken, and a run outside a loop has none of the three."""
    names = ("warm-start", "turn-1", "gate-v2.abcdef", "control.abcdef", "run-v1.ffffff", "agent-20261121T093000.1")
    rows = ", ".join(f"('default', '{name}', {n}, 0, 0, 0, 0, '{{}}', '{{}}')" for n, name in enumerate(names))
    columns = "project, name, position, n_episodes, n_tool_calls, wall_s, cpu_s, dropped, metrics"
    reports = "('default', 'abcdef01', 2, '{}'), ('default', 'abc00000', 2, '{}'), ('other', 'ffffff01', 1, '{}')"
    at_schema(
        tmp_path / "store.db",
        4,
        f"INSERT INTO stage ({columns}) VALUES {rows}",
        f"INSERT INTO eval_report (project, suite_hash, policy_version, body) VALUES {reports}",
    )
    store = Store(tmp_path / "store.db", create=False)
    stages = store.stages()
    store.close()
    assert {name: (row.kind, row.version, row.suite_hash) for name, row in stages.items()} == {
        "warm-start": ("warm-start", 1, None),
        "turn-1": ("turn", 2, None),
        "gate-v2.abcdef": ("gate", 2, "abcdef01"),
        "control.abcdef": ("control", 0, "abcdef01"),
        "run-v1.ffffff": ("run", 1, None),
        "agent-20261121T093000.1": ("other", None, None),
    }


def test_a_store_of_schema_1_opens_with_everything_in_it(old: Path) -> None:
    store = Store(old, create=False)
    for name, reward, minute in (("t1", 1.0, 0), ("t2", 0.0, 0), ("t3", None, 2)):
        put = judged(name, reward=reward, minute=minute)
        row, *found = store.trace(name)
        assert found == [put.trace, put.verdict]
        assert (row.project, row.source, row.stage, row.reward) == ("default", "agentloop", "turn-1", reward)
        assert row.started_at == put.trace.started_at
        assert store.verdict("default", name) == put.verdict
    assert [row.id for row in store.stage_traces("turn-1")] == ["t1", "t2", "t3"]
    stages = store.stages()
    assert [(row.name, row.kind, row.version) for row in stages.values()] == [
        ("turn-2", "turn", 3),
        ("turn-1", "turn", 2),
    ]
    assert store.versions() == [version(1)]
    assert store.report("h", 1) is not None
    assert [trace.id for trace in store.find('text:"line 2" tool:shell').traces] == ["t3", "t2", "t1"]
    assert [trace.id for trace in store.find("score.exact<1 failure:obs.misread").traces] == ["t2"]
    store.put_spans("p", [span()])
    store.put_attempts("turn-1", [judged("t4")])
    store.close()
    again = Store(old)
    assert again.n_traces() == 5
    again.close()


def test_who_only_looks_leaves_an_older_file_as_it_is(old: Path) -> None:
    with closing(sqlite3.connect(old)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")  # as agentloop wrote it
    before = old.read_bytes()
    with pytest.raises(
        StoreError, match=rf"has schema 1, this agentloop reads \d+; run `agentloop store upgrade --store {old}`"
    ):
        Store(old, create=False, upgrade=False)
    assert old.read_bytes() == before
    Store(old).close()
    Store(old, create=False, upgrade=False).close()


def test_a_store_of_schema_4_opens_with_everything_in_it(where: str | Path) -> None:
    load_schema_4(where)
    if isinstance(where, str):
        with pytest.raises(StoreError, match=r"has schema 4, this agentloop writes \d+; .* `agentloop store upgrade`"):
            Store(where)
    for project in ("default", "ann"):
        store = Store(where, project=project, create=False, upgrade=True)
        assert [(row.id, row.superseded) for row in store.stage_traces("turn-1")] == [
            ("t1", None), ("t2", None), ("t3", None),
        ]  # fmt: skip
        assert list(store.stages()) == ["turn-1"]
        assert store.versions() == [version(1)]
        assert store.row(project, "t1").reward == (0.25 if project == "default" else 1.0)
        found = store.find('text:"line 2" stage:gate-v1.5f', project=project).traces
        assert [trace.id for trace in found] == ["t4"]
        [again] = store.put_attempts("turn-1", [judged("t3", answer="again")], first=2)
        assert [row.id for row in store.stage_traces("turn-1")] == ["t1", "t2", again.trace.id]
        assert store.row(project, "t3").superseded == "turn-1"
        assert store.begin_evidence("gate", "k", {}).outcomes() == []
        assert store.missing() == []
        store.close()


def test_an_upgrade_that_was_cut_short_goes_on(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("agentloop.store.traces.replace_verdicts", _fail)
        with pytest.raises(RuntimeError):
            Store(old)
    store = Store(old)
    assert [trace.id for trace in store.find("text:line score.exact:1").traces] == ["t1"]
    store.close()


def _fail(*_: object) -> None:
    raise RuntimeError


def test_the_tables_are_what_the_code_says(either: Store) -> None:
    with either._engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"include_name": _not_full_text})
        assert compare_metadata(context, SQLModel.metadata) == []


def _not_full_text(name: str | None, kind: str, _: object) -> bool:
    return not (name or "").startswith((FULL_TEXT, "alembic_version", "sqlite_"))


@pytest.mark.first(where=1)
def test_many_may_open_a_new_store_at_once(where: str | Path) -> None:
    program = "import sys; from agentloop.store.store import Store; Store(sys.argv[1]).close()"
    started = [
        subprocess.Popen([sys.executable, "-c", program, str(where)], stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in started:
        _, problem = process.communicate(timeout=60)
        assert process.returncode == 0, problem
    store = Store(where)
    store.put_spans("p", [span()])
    store.close()


def test_a_server_of_a_newer_schema_is_refused(postgresql: str) -> None:
    store = Store(postgresql)
    with store._engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0099'")
    store.close()
    with pytest.raises(StoreError, match=f"has schema 99, this agentloop writes {SCHEMA_VERSION}; use the agentloop"):
        Store(postgresql)


def _other_tables(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE trace (x)")
    connection.close()


@pytest.mark.parametrize("make", [_other_tables])
def test_tables_of_something_else_are_left_alone(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "store.db")
    with pytest.raises(StoreError, match="tables of something else"):
        Store(tmp_path / "store.db")


@pytest.mark.parametrize("where", ["mysql://a:b@c/d", "http://x/y", "://", "postgres ql://x"])
def test_what_is_no_store_url_is_refused(where: str) -> None:
    with pytest.raises(ConfigError, match="postgresql://USER:PASSWORD@HOST/NAME"):
        Store(where)


def test_a_server_that_is_not_there_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        Store(f"postgresql://bob:hunter2@/x?host={tmp_path}")
    message = str(caught.value)
    assert "hunter2" not in message
    assert "check that the server runs" in message
    assert "\n" not in message
