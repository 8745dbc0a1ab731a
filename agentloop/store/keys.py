"""Keys of the trace service, by what is kept of them: never the words that open it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from sqlalchemy import delete, func, select
from sqlmodel import col

from agentloop.store.database import Database
from agentloop.store.tables import KeyRow


class Key(NamedTuple):
    """What is remembered of a key."""

    id: str
    sha256: str
    """Of the whole key, in hex."""
    project: str
    scopes: tuple[str, ...]


class Keys:
    """The part of the store that knows who may use it."""

    _database: Database

    def put_key(self, key: Key) -> None:
        """Remember a new key."""
        row = {"id": key.id, "sha256": key.sha256, "project": key.project, "scopes": " ".join(key.scopes)}
        with self._database.session(write=True) as session:
            session.add(KeyRow(**row, made_at=datetime.now(UTC)))

    def key(self, key_id: str) -> Key | None:
        """The key of that id, unless it was revoked."""
        with self._database.session() as session:
            row = session.get(KeyRow, key_id)
        return _key(row) if row else None

    def keys(self) -> list[Key]:
        """All of them, the oldest first."""
        with self._database.session() as session:
            return [_key(row) for row in session.scalars(select(KeyRow).order_by(col(KeyRow.made_at)))]

    def n_keys(self) -> int:
        """How many there are."""
        with self._database.read() as connection:
            return int(connection.execute(select(func.count()).select_from(KeyRow)).scalar_one())

    def revoke_key(self, key_id: str) -> bool:
        """Forget a key; whether there was one."""
        with self._database.write() as connection:
            return connection.execute(delete(KeyRow).where(col(KeyRow.id) == key_id)).rowcount > 0


def _key(row: KeyRow) -> Key:
    return Key(row.id, row.sha256, row.project, tuple(row.scopes.split()))
