"""What only the engine can show: images, a container's end, and an engine that does not answer."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import socket
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentloop.errors import CapabilityError, SandboxGone, SandboxUnavailable
from agentloop.sandbox import docker as docker_module
from agentloop.sandbox import host
from agentloop.sandbox.bubblewrap import BubblewrapBackend
from agentloop.sandbox.docker import DockerBackend
from agentloop.sandbox.ladder import choose_backend
from agentloop.testing import opened
from agentloop.types import SandboxSpec

from .processes import comes_true
from .test_owner import owner

TAG = "agentloop-test/local"


@pytest.fixture
def client(docker: DockerBackend) -> Iterator[Any]:
    with docker_module._engine() as client:
        yield client


@pytest.fixture
def tag(client: Any) -> Iterator[str]:
    """A local image: the host's python3 with all it needs, and a CMD, an ENTRYPOINT and an ENV of its own."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in ("proc", "dev", "sys", "etc", "work"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
        for path in _needed():
            tar.add(os.path.realpath(path), path.lstrip("/"))
        tar.add(os.path.realpath("/bin/sh"), "bin/sh")
        tar.add(host.python(), host.python().lstrip("/"))
        link = tarfile.TarInfo("bin/python3")
        link.type, link.linkname = tarfile.SYMTYPE, host.python()
        tar.addfile(link)
        tar.add(_library(), _library().lstrip("/"), filter=_no_packages)
    changes = ['ENTRYPOINT ["/bin/false"]', 'CMD ["wrong"]', "ENV FROM_IMAGE=yes", "USER 0"]
    client.api.import_image_from_data(archive.getvalue(), repository=TAG, tag="latest", changes=changes)
    yield TAG
    client.images.remove(TAG, force=True)


def _library() -> str:
    return os.path.dirname(os.__file__)


def _no_packages(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    parts = ("site-packages", "__pycache__", "test", "idlelib", "ensurepip", "config-", "tkinter")
    return None if any(f"/{part}" in entry.name for part in parts) else entry


def _needed() -> set[str]:
    """Shared libraries of the shell and of this interpreter, as the linker names them."""
    modules = [str(p) for p in Path(_library(), "lib-dynload").glob("*.so")]
    done = subprocess.run(["ldd", "/bin/sh", host.python(), *modules], capture_output=True, text=True, check=False)
    return set(re.findall(r"(/\S+) \(0x", done.stdout))


@pytest.mark.slow
def test_a_local_image_runs_with_its_own_settings(docker: DockerBackend, tag: str) -> None:
    async def scene() -> str:
        async with opened(docker, SandboxSpec(image=tag)) as box:
            done = await box.exec("echo $FROM_IMAGE; echo x > note && echo written; test -e /usr/bin || echo own root")
            assert done.stderr == ""
            return done.stdout

    assert asyncio.run(scene()) == "yes\nwritten\nown root\n"


@pytest.mark.slow
def test_an_image_without_python_says_so_and_leaves_no_container(docker: DockerBackend, client: Any) -> None:
    docker_module._host_image(client)
    mine = {"label": f"{docker_module.OWNER}={docker_module._owner()}"}

    async def scene() -> None:
        await docker.create(SandboxSpec(image=docker_module.HOST_IMAGE))

    with pytest.raises(SandboxUnavailable, match="python3"):
        asyncio.run(scene())
    assert client.containers.list(all=True, filters=mine) == []


@pytest.mark.slow
def test_an_unknown_image_names_the_remedy(docker: DockerBackend) -> None:
    async def scene() -> None:
        await docker.create(SandboxSpec(image="no/such:image"))

    with pytest.raises(CapabilityError, match=r"no local Docker image 'no/such:image'; build or pull it"):
        asyncio.run(scene())


@pytest.mark.slow
def test_docker_kill_is_infrastructure(docker: DockerBackend, client: Any) -> None:
    async def scene() -> None:
        async with opened(docker) as box:
            pending = asyncio.ensure_future(box.exec("sleep 60", timeout_s=60.0))
            await box.exec("true")
            await asyncio.to_thread(client.containers.get(box.id).kill)
            with pytest.raises(SandboxGone):
                await asyncio.wait_for(pending, 5.0)
            with pytest.raises(SandboxGone):
                await box.exec("true")

    asyncio.run(scene())


@pytest.mark.slow
def test_the_container_goes_with_its_owner(docker: DockerBackend, client: Any) -> None:
    def names() -> list[str]:
        return [c["Names"][0].lstrip("/") for c in client.api.containers(all=True)]

    with owner("docker", f"79{os.getpid()}.5") as (process, box_id):
        assert box_id in names()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert comes_true(lambda: box_id not in names()), "the container is still there"


@pytest.mark.slow
def test_a_container_that_never_started_is_swept(docker: DockerBackend, client: Any) -> None:
    image = docker_module._host_image(client)
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    os.waitpid(dead, 0)
    boot, namespace, _ = docker_module._owner(dead).split("/")
    labels = {
        "dead": docker_module._owner(dead),
        "alive": docker_module._owner(),
        "another boot": f"{boot[::-1]}/{namespace}/{dead}",
        "another namespace": f"{boot}/pid:[1]/{dead}",
        "no place": str(dead),
        "no number": f"{boot}/{namespace}/x",
        "words": "someone else's",
    }
    left = {
        word: client.containers.create(image, ["/x"], labels={docker_module.OWNER: label}).id
        for word, label in labels.items()
    }
    try:
        docker_module._sweep(client)
        found = {c["Id"] for c in client.api.containers(all=True)}
        assert {word for word, made in left.items() if made in found} == set(labels) - {"dead"}
    finally:
        for word in set(labels) - {"dead"}:
            client.containers.get(left[word]).remove(force=True)


@pytest.mark.slow
def test_the_engine_holds_what_is_promised(docker: DockerBackend) -> None:
    async def scene() -> dict[str, str]:
        async with opened(docker) as box:
            lines = (await box.exec("cat /proc/self/status; id -u")).stdout.splitlines()
            assert (await box.exec("echo x > /x; echo x > /etc/x")).exit_code != 0
            return {line.split(":")[0]: line.split(":")[-1].strip() for line in lines}

    status = asyncio.run(scene())
    assert (int(status["CapEff"], 16), status["NoNewPrivs"], status["Seccomp"]) == (0, "1", "2")
    assert "1000" in status


def ours(client: Any) -> list[str]:
    label = f"{docker_module.OWNER}={docker_module._owner()}"
    return [c["Id"] for c in client.api.containers(all=True, filters={"label": label})]


@pytest.mark.slow
def test_the_probe_starts_a_box_and_leaves_none(
    docker: DockerBackend, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    start = docker_module._start

    def noted(spec: SandboxSpec, name: str, *rest: Any) -> None:
        start(spec, name, *rest)
        made.append(f"{spec.image} {client.containers.get(name).status}")

    async def within_a_loop() -> str | None:
        return docker.probe()

    monkeypatch.setattr(docker_module, "_start", noted)
    assert asyncio.run(within_a_loop()) is None
    assert made == ["host running"]
    assert ours(client) == []


@pytest.mark.slow
def test_an_engine_that_cannot_start_a_box_is_passed_over(
    docker: DockerBackend, bubblewrap: BubblewrapBackend, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_module.host, "read_only_paths", lambda: ["/no/such/folder"])
    reason = docker.probe()
    assert reason is not None
    assert "/no/such/folder" in reason
    assert re.fullmatch(r"the Docker Engine answers, but no box starts \(.+\); see .+, or use bubblewrap", reason)
    assert ours(client) == []
    monkeypatch.setattr(BubblewrapBackend, "probe", lambda self: None)
    assert choose_backend("auto").name == "bubblewrap"


@pytest.mark.slow
def test_a_box_that_does_not_answer_is_given_up(
    docker: DockerBackend, client: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    silent = tmp_path / "supervisor.py"
    silent.write_text("import time; time.sleep(60)")
    tmp_path.chmod(0o755)
    monkeypatch.setattr(docker_module.host, "SUPERVISOR", silent)
    monkeypatch.setattr(docker_module, "PROBE_BOX_S", 2.0)
    started = time.monotonic()
    reason = docker.probe()
    assert reason == ("the Docker Engine answers, but no box starts in 2 s; see the engine's log, or use bubblewrap")
    assert time.monotonic() - started < 6.0
    assert ours(client) == []


@pytest.mark.parametrize("where", ["unix:///no/such/socket", "tcp://127.0.0.1:9", "nonsense://x"])
def test_no_engine_is_one_line_at_once(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", where)
    started = time.monotonic()
    reason = DockerBackend().probe()
    assert reason is not None
    assert time.monotonic() - started < 2.5
    assert re.fullmatch(r"no Docker Engine answers \(.+\); start one, or use bubblewrap", reason)


def test_an_engine_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/s")
        monkeypatch.setattr(docker_module, "PROBE_TIMEOUT_S", 0.3)
        started = time.monotonic()
        reason = DockerBackend().probe()
    assert reason is not None
    assert "no Docker Engine answers" in reason
    assert time.monotonic() - started < 1.5


def test_an_engine_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_module.sys, "platform", "darwin")
    assert "use Linux" in (DockerBackend().probe() or "")
