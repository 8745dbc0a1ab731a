"""The tables that the migrations make of an empty SQLite file, as SQL."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from sqlalchemy import create_engine

from agentloop.store.migrations import STRUCTURE, _upgrade

STATEMENTS = """
SELECT sql FROM sqlite_master JOIN pragma_table_list AS listed ON listed.name = tbl_name
WHERE sql IS NOT NULL AND listed.schema = 'main' AND listed.type != 'shadow' ORDER BY sqlite_master.rowid
"""


def migrated(path: Path) -> str:
    """What `structure.sql` has to say. path: of a file that does not exist yet."""
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        _upgrade(connection, 0)
    engine.dispose()
    return structure(path)


def structure(path: Path) -> str:
    """The statements that make the tables of a store, and the rows that they begin with."""
    connection = sqlite3.connect(path)
    statements = [sql for (sql,) in connection.execute(STATEMENTS)]
    for key, value in connection.execute("SELECT k, v FROM body_text_config WHERE k != 'version'"):
        statements.append(f"INSERT INTO body_text(body_text, rank) VALUES ('{key}', {value})")
    (version,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    connection.close()
    statements.append(f"INSERT INTO alembic_version (version_num) VALUES ('{version}')")
    return "".join(f"{sql.strip()};\n" for sql in statements)


def record(folder: Path) -> list[Path]:
    STRUCTURE.write_text(migrated(folder / "store.db"))
    return [STRUCTURE]
