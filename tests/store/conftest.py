"""A store of each kind; PostgreSQL is a real server of its own, in a temporary folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentloop.store.store import Store
from agentloop.testing import postgresql as postgresql_server


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The URL of a PostgreSQL server without a database name."""
    if postgresql_server.binaries() is None:
        message = f"no PostgreSQL here. Remedy: {postgresql_server.REMEDY}"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    with postgresql_server.server() as url:
        yield url


@pytest.fixture
def postgresql(server: str) -> Iterator[str]:
    """The URL of an empty database."""
    with postgresql_server.database(server) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    """Where a new store may be made."""
    if request.param == "sqlite":
        return tmp_path / "traces" / "store.db"
    url: str = request.getfixturevalue("postgresql")
    return url


@pytest.fixture
def either(where: str | Path) -> Iterator[Store]:
    """A new store of each kind."""
    made = Store(where)
    yield made
    made.close()
