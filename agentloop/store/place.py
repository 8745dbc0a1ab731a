"""Which store a command, or a program, is about."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from agentloop.config.settings import STORE
from agentloop.errors import StoreError
from agentloop.store.store import Store


def open_store(
    where: str | None = None, *, project: Path = Path(), create: bool = True, secrets: Iterable[str] = ()
) -> Store:
    """The store that is named, or that of the project in its folder. secrets: what must never be stored in it."""
    place = (where if "://" in where else Path(where)) if where else project / STORE
    if not create and isinstance(place, Path) and not place.exists():
        raise StoreError(
            f"no trace store at {place}; `agentloop traces import`, `agentloop serve`, `agentloop loop` and "
            "`agentloop demo` make one; name another with --store, or its project's folder with -p"
        )
    return Store(place, create=create, secrets=secrets)
