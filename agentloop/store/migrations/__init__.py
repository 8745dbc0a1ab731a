"""Migrates the tables from schema to schema with Alembic; revision `0002` is schema 2.

Files are migrated when they are opened, servers by `agentloop store upgrade`, under a lock. A new file gets its tables
from `structure.sql`, which equals the result of all migrations on an empty file: each command that creates a store
saves the quarter of a second that Alembic needs. After a new migration, run `python -m tests.pins.record structure`.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from sqlalchemy import Connection, inspect, text

from agentloop.errors import StoreError
from agentloop.store.database import Database
from agentloop.store.engines import MIGRATION_LOCK
from agentloop.store.tables import SCHEMA_VERSION

STRUCTURE = Path(__file__).with_name("structure.sql")


def migrate(database: Database, *, create: bool = True, upgrade: bool | None = None) -> int | None:
    """Brings the tables to this package's schema.

    create: False leaves an empty server empty. upgrade: True also migrates the older tables of a server, which other
    processes may use; False migrates nothing, not even a file. Returns the earlier schema, 0 for an empty store, or
    None if nothing had to be done. Raises StoreError for a newer schema, which stays unchanged, and for a migration
    that these arguments do not allow.
    """
    with database.read() as connection:
        before = _schema(connection, database)
        if before == SCHEMA_VERSION:
            return None
    if upgrade is False and database.path is not None:
        command = f"`agentloop store upgrade --store {shlex.quote(str(database.path))}`"
        if before:
            raise StoreError(
                f"{database.name} has schema {before}, this agentloop reads {SCHEMA_VERSION}; run {command}"
            )
        raise StoreError(f"{database.name} is empty; {command} makes a trace store there")
    if not database.is_sqlite and not upgrade:
        if before:
            raise StoreError(
                f"{database.name} has schema {before}, this agentloop writes {SCHEMA_VERSION}; end what uses it, then "
                "run `agentloop store upgrade`"
            )
        if not create:
            raise StoreError(f"{database.name} is empty; `agentloop store upgrade` makes a trace store there")
    with database.write() as connection:
        if not database.is_sqlite:
            # A migration of a large table may take longer than any statement of normal use.
            connection.execute(text("SET LOCAL statement_timeout = 0"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK})
        # Again, under the lock: another process may have migrated meanwhile.
        before = _schema(connection, database)
        if before == SCHEMA_VERSION:
            return None
        if database.is_sqlite and not before:
            _create(connection)
        else:
            _upgrade(connection, before)
        if database.is_sqlite:
            # Part of the transaction, so a killed migration leaves the old number with the old tables.
            connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION:d}")
        return before


def _schema(connection: Connection, database: Database) -> int:
    """The number of the schema. SQLite keeps it in the file's header, where agentloop's first release also looks."""
    tables = set() if database.is_sqlite else set(inspect(connection).get_table_names())
    if database.is_sqlite:
        number = int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())
    elif "alembic_version" in tables:
        number = int(connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar() or 0)
    else:
        number = 0
    if number > SCHEMA_VERSION:
        place = "folder" if database.is_sqlite else "database"
        raise StoreError(
            f"{database.name} has schema {number}, this agentloop writes {SCHEMA_VERSION}; use the agentloop that "
            f"upgraded it, or use another {place}"
        )
    if not number and {"alembic_version", "trace", "api_key"} <= tables:
        raise StoreError(
            f"{database.name} has a trace store without the number of its schema: it is half migrated, or was changed "
            "by hand; bring back a copy from before that"
        )
    if not number and ("trace" in tables or (database.is_sqlite and inspect(connection).has_table("trace"))):
        place = "folder" if database.is_sqlite else "database"
        raise StoreError(
            f"{database.name} has tables of something else; this is no trace store; choose another {place}"
        )
    return number


def _create(connection: Connection) -> None:
    for statement in STRUCTURE.read_text().split(";\n"):
        if statement.strip():
            connection.exec_driver_sql(statement)


def _upgrade(connection: Connection, number: int) -> None:
    from alembic import command  # a third of a second, and only needed when something changes
    from alembic.config import Config

    config = Config()
    # Alembic reads its options through configparser, in which `%` begins an interpolation.
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    if number and not inspect(connection).has_table("alembic_version"):
        command.stamp(config, f"{number:04d}")
    command.upgrade(config, f"{SCHEMA_VERSION:04d}")
