"""Fixtures of tests that look at the engine itself."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentloop.sandbox.docker import DockerBackend
from agentloop.sandbox.engine import OWNER, engine, labels
from agentloop.types import SandboxSpec

from .roots import packed, python_root

TAG = "agentloop-test/local"
SETTINGS = [
    'ENTRYPOINT ["/bin/false"]',
    'CMD ["wrong"]',
    "ENV FROM_IMAGE=yes",
    "USER 0",
    "WORKDIR /app",
    "VOLUME /volume",
    "HEALTHCHECK --interval=1s CMD echo x >> /tmp/ran",
]


@pytest.fixture
def client(docker: DockerBackend) -> Iterator[Any]:
    """A client of the engine that the tests use."""
    with engine() as client:
        yield client


@pytest.fixture(scope="session")
def python_tar() -> Iterator[Path]:
    """A root file system that has a shell and python3."""
    with tempfile.TemporaryDirectory() as folder:
        yield packed(python_root(Path(folder, "root")), Path(folder, "root.tar"))


@pytest.fixture(params=[False, True], ids=["user", "root"])
def spec(
    request: pytest.FixtureRequest, python_tar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> SandboxSpec:
    """A box of the host's programs, and one of an image that is root in it, in turn."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return SandboxSpec(image=str(python_tar), root=True) if request.param else SandboxSpec()


@pytest.fixture
def tag(client: Any, python_tar: Path) -> Iterator[str]:
    """A local image that has every setting which a box must not take over, and some that it must."""
    client.api.import_image(str(python_tar), repository=TAG, tag="latest", changes=SETTINGS)
    yield TAG
    client.images.remove(TAG, force=True)


def ours(client: Any) -> list[str]:
    """Containers of this process, in whatever state."""
    label = f"{OWNER}={labels(None)[OWNER]}"
    return [found["Id"] for found in client.api.containers(all=True, filters={"label": label})]
