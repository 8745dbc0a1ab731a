from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from .browsing import chromium


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser
