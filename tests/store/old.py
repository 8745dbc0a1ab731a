"""Stores as earlier versions left them."""

from __future__ import annotations

import gzip
from pathlib import Path

import psycopg
from alembic import command
from alembic.config import Config

from agentloop.store import migrations
from agentloop.store.database import Database

SCHEMA_4 = {
    "sqlite": Path(__file__).with_name("schema_4.db.gz"),
    "postgresql": Path(__file__).with_name("schema_4_postgresql.sql"),
}
LOOP_OF_SCHEMA_3 = (
    "INSERT INTO policy_version (number, parent, kind, artifact, sha256, config_hash, state, note, created_at) VALUES "
    "(1, NULL, 'weights', NULL, 's1', 'c', 'live', 'µ', '2026-11-21 09:30:00.123456')",
    "INSERT INTO stage (name, position, n_episodes, n_tool_calls, wall_s, cpu_s, dropped, metrics) VALUES "
    "('turn-2', 1, 5, 7, 1.5, 0.5, '{\"flat\": 3}', '{\"validation\": 0.25}'), ('turn-1', 2, 0, 0, 0, 0, '{}', '{}')",
    "INSERT INTO eval_report (suite_hash, policy_version, body) VALUES "
    '(\'h\', 1, \'{"suite": "s", "suite_hash": "h", "policy_version": 1, "rewards": {"a": [1.0]}}\')',
)


def at_schema(where: str | Path, number: int, *rows: str) -> None:
    """Make a store of schema `number`, with rows."""
    database = Database(where)
    database.keep_private()
    with database.write() as connection:
        config = Config()
        config.set_main_option("script_location", str(Path(migrations.__file__).parent))
        config.attributes["connection"] = connection
        command.upgrade(config, f"{number:04d}")
        for row in rows:
            connection.exec_driver_sql(row)
        if database.is_sqlite:
            connection.exec_driver_sql(f"PRAGMA user_version = {number:d}")
    database.engine.dispose()


def load_schema_4(where: str | Path) -> None:
    """What agentloop wrote before schema 5: two projects, as a file, and as PostgreSQL dumps them."""
    if isinstance(where, Path):
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_bytes(gzip.decompress(SCHEMA_4["sqlite"].read_bytes()))
        return
    with psycopg.connect(where, autocommit=True) as server:
        server.execute(SCHEMA_4["postgresql"].read_bytes())
