"""The service's routes: the OpenAPI document, compared whole, and answers to a request at each kind of path."""

from __future__ import annotations

from typing import Any

import pytest
from parts import need_ports

from .compare import assert_same, read
from .service import ANSWERS_PIN, DOCUMENT_PIN, SERVERS, observe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def replies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    need_ports()
    return observe(tmp_path_factory.mktemp("service"))


def test_the_openapi_document_is_the_pin(replies: dict[str, Any]) -> None:
    assert_same(read(DOCUMENT_PIN), replies["document"], "/openapi.json")


@pytest.mark.parametrize("server", SERVERS)
def test_each_path_answers_as_pinned(server: str, replies: dict[str, Any]) -> None:
    assert_same(read(ANSWERS_PIN)[server], replies["answers"][server], f"agentloop serve {' '.join(SERVERS[server])}")
