"""One schema after another, by Alembic: revision `0002` is schema 2. Run when a store is opened, under a lock."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from agentloop.errors import StoreError
from agentloop.store.database import MIGRATION_LOCK, Database
from agentloop.store.tables import SCHEMA_VERSION


def migrate(database: Database) -> int | None:
    """Bring the tables to this version's schema.

    Returns the schema that was found, 0 for an empty store, or None when there was nothing to do. Raises StoreError
    for a newer one, which is left as it is.
    """
    with database.read() as connection:
        if _schema(connection, database.name) == SCHEMA_VERSION:
            return None
    with database.write() as connection:
        if not database.is_sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK})
        found = _schema(connection, database.name)  # another process may have been quicker
        if found == SCHEMA_VERSION:
            return None
        _upgrade(connection, found)
        if database.is_sqlite:
            connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION:d}")
        return found


def _schema(connection: Connection, name: str) -> int:
    """The number of the schema; SQLite keeps it in its header, where the first agentloop looks for it too."""
    if connection.dialect.name == "sqlite":
        found = int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())
    elif inspect(connection).has_table("alembic_version"):
        found = int(connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar() or 0)
    else:
        found = 0
    if found > SCHEMA_VERSION:
        raise StoreError(f"{name} has schema {found}, this agentloop writes {SCHEMA_VERSION}; use another folder")
    if not found and inspect(connection).has_table("trace"):
        raise StoreError(f"{name} has tables of something else; this is no trace store; choose another folder")
    return found


def _upgrade(connection: Connection, found: int) -> None:
    from alembic import command  # a third of a second, and only needed when something changes
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    if found and not inspect(connection).has_table("alembic_version"):
        command.stamp(config, f"{found:04d}")
    command.upgrade(config, f"{SCHEMA_VERSION:04d}")
