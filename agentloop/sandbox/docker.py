"""Boxes from a Docker Engine (API 1.41 or newer) on this machine, through the docker SDK.

Commands go to the supervisor over a socket in a read-only mount, never through `docker exec`.
Holds: own namespaces, no network, no capabilities, no new privileges, the engine's seccomp
filter, read-only root, sized tmpfs; wall time and output (supervisor). Does not hold: memory, CPU
and process counts. The image `host` is empty and sees this machine's /usr read-only, so nothing
has to be pulled; any other image is a local tag that has python3 and a shell.
"""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
import uuid
from typing import Any

from agentloop.errors import CapabilityError, SandboxGone, SandboxUnavailable, boundary
from agentloop.sandbox import host
from agentloop.sandbox.box import Box
from agentloop.sandbox.channel import Channel, Door
from agentloop.types import SandboxSpec

MIN_API = (1, 41)
HOST_IMAGE = "agentloop/host"
PROBE_TIMEOUT_S = 2
USER = "1000:1000"


class DockerBackend:
    """See `protocols.SandboxBackend`."""

    name = "docker"
    isolation = "container"

    def __init__(self) -> None:
        self._client: Any = None

    def probe(self) -> str | None:
        """Asks the engine; None when it answers, is new enough and shares this machine's files."""
        import docker
        from docker.errors import DockerException

        try:
            client = docker.from_env(timeout=PROBE_TIMEOUT_S)
            version = client.version()
        except DockerException as error:
            return f"no Docker Engine answers ({str(error)[:120]}); start one, or use bubblewrap"
        if tuple(map(int, version["ApiVersion"].split("."))) < MIN_API:
            return f"the Docker Engine speaks API {version['ApiVersion']}, 1.41 is needed; update it"
        if not client.api.base_url.startswith("http+docker://"):
            return "the Docker Engine is on another machine and cannot see this one's files; use a local engine"
        return None

    async def create(self, spec: SandboxSpec) -> Box:
        """A started container with its supervisor connected. Raises SandboxUnavailable or CapabilityError."""
        door = Door()
        await door.open()
        container: Any = None
        try:
            with boundary(SandboxUnavailable, "docker cannot start a box", image=spec.image):
                container = await asyncio.to_thread(self._start, spec, str(door.folder))
            channel = await self._first(door, container)
        except BaseException:
            if container is not None:
                await asyncio.to_thread(_remove, container)
            door.remove()
            raise
        started = container
        return Box(f"docker-{container.short_id}", self.isolation, channel, door, lambda: _remove(started))

    async def _first(self, door: Door, container: Any) -> Channel:
        try:
            return await door.entered()
        except (TimeoutError, SandboxGone) as error:
            logs = await asyncio.to_thread(_last_words, container)
            raise SandboxUnavailable(f"the supervisor did not start in docker: {logs or error}; has the image python3?") from error

    def _engine(self) -> Any:
        if self._client is None:
            import docker

            self._client = docker.from_env()
        return self._client

    def _start(self, spec: SandboxSpec, door: str) -> Any:
        client = self._engine()
        is_host = spec.image == "host"
        image = self._host_image() if is_host else self._local_image(spec.image)
        interpreter = host.python() if is_host else "python3"
        return client.containers.run(
            image,
            [interpreter, "-I", "-S", f"{host.INSIDE}/supervisor.py", f"{host.INSIDE}/door/s"],
            entrypoint=[],
            detach=True,
            auto_remove=True,
            mounts=_mounts(spec, door, is_host),
            tmpfs=_tmpfs(spec),
            working_dir="/work",
            user=USER,
            hostname="sandbox",
            network_mode="none",
            read_only=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            log_config={"type": "none"},
            labels={"agentloop.owner": str(os.getpid())},
            name=f"agentloop-{uuid.uuid4().hex[:12]}",
        )

    def _host_image(self) -> str:
        """An image with nothing in it but mount points, made once from an empty archive."""
        from docker.errors import ImageNotFound

        client = self._engine()
        try:
            client.images.get(HOST_IMAGE)
        except ImageNotFound:
            client.api.import_image_from_data(_empty_root(), repository=HOST_IMAGE, tag="latest")
        return HOST_IMAGE

    def _local_image(self, name: str) -> str:
        from docker.errors import ImageNotFound

        try:
            self._engine().images.get(name)
        except ImageNotFound:
            raise CapabilityError(f"no local Docker image {name!r}; build or pull it, or use image = 'host'") from None
        return name


def _mounts(spec: SandboxSpec, door: str, is_host: bool) -> list[Any]:
    from docker.types import Mount

    pairs = [(str(host.SUPERVISOR), f"{host.INSIDE}/supervisor.py"), (door, f"{host.INSIDE}/door")]
    if spec.files is not None:
        pairs.append((str(spec.files), "/work" if spec.read_only else f"{host.INSIDE}/files"))
    if is_host:
        paths = [*host.read_only_paths(), *(p for p in host.links())]
        pairs += [(os.path.realpath(path), path) for path in paths]
    return [Mount(target, source, type="bind", read_only=True) for source, target in pairs]


def _tmpfs(spec: SandboxSpec) -> dict[str, str]:
    options = f"size={spec.scratch_mb}m,mode=1777,exec"
    writable = {"/tmp": options}  # noqa: S108 - the box's own
    if spec.files is None or not spec.read_only:
        writable["/work"] = options
    return writable


def _empty_root() -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in ("work", "tmp", "run", "proc", "dev", "sys", "etc"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
    return archive.getvalue()


def _remove(container: Any) -> None:
    """End and remove; one that is already going is as good as gone."""
    from docker.errors import APIError, NotFound

    try:
        container.remove(force=True)
    except NotFound:
        return
    except APIError as error:
        if error.status_code != 409:
            raise


def _last_words(container: Any) -> str:
    from docker.errors import APIError, NotFound

    try:
        container.reload()
        return f"container is {container.status}"
    except (APIError, NotFound):
        return "the container ended at once"
