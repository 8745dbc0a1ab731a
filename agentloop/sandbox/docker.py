"""Boxes from a Docker Engine (API 1.41 or newer) on this machine, through the docker SDK.

Commands go to the supervisor over a socket in a read-only mount, never through `docker exec`.
Holds: own namespaces, no network, no capabilities, no new privileges, the engine's seccomp
filter, read-only root, sized tmpfs, number of processes; wall time and output (supervisor). Does
not hold: memory and CPU. The image `host` is empty and sees this machine's /usr read-only, so
nothing has to be pulled; any other image is a local tag that has python3 (3.8 or newer) and a shell.
"""

from __future__ import annotations

import asyncio
import io
import os
import socket
import sys
import tarfile
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from agentloop.errors import CapabilityError, SandboxError, SandboxGone, SandboxUnavailable, boundary
from agentloop.sandbox import host
from agentloop.sandbox.box import Box
from agentloop.sandbox.channel import Door, is_alive
from agentloop.types import SandboxSpec

MIN_API = (1, 41)
HOST_IMAGE = "agentloop/host"
PROBE_TIMEOUT_S = 2
PROBE_BOX_S = 10.0
"""When a first box counts as one that does not start; a busy machine takes seconds."""
ENGINE_TIMEOUT_S = 60
REMOVE_TIMEOUT_S = 10
MAX_PROCESSES = 1024
"""Processes and threads of a box: enough for a build on many cores, too few to stop the machine."""
LOCAL = "http+docker://localhost"
"""How the SDK writes an engine behind a unix socket."""
OWNER = "agentloop.owner"
"""Label of a container: boot id/process namespace/process number of who made it."""
NOBODY_SPECIAL = "1000:1000"


class DockerBackend:
    """See `protocols.SandboxBackend`. Keeps no connection to the engine between calls."""

    name = "docker"
    isolation = "container"

    def probe(self) -> str | None:
        """Asks the engine and starts a real box; None when that worked, else the reason and the remedy."""
        from docker.errors import DockerException

        if not sys.platform.startswith("linux"):
            return (
                f"on {sys.platform} the Docker Engine runs in a machine of its own, without this one's files; use Linux"
            )
        try:
            with _engine(PROBE_TIMEOUT_S) as client:
                api, url = client.api.api_version, client.api.base_url
        except (DockerException, OSError) as error:
            return _explained(error)
        if tuple(map(int, api.split("."))) < MIN_API:
            return f"the Docker Engine speaks API {api}, 1.41 is needed; update it"
        if url != LOCAL:
            return f"the Docker Engine at {url} is not on this machine and cannot see its files; use a local engine"
        with ThreadPoolExecutor(1) as aside:  # because the caller may be in an event loop
            return aside.submit(asyncio.run, self._try_box()).result()

    async def _try_box(self) -> str | None:
        remedy = "see the engine's log, or use bubblewrap"
        try:
            async with asyncio.timeout(PROBE_BOX_S):
                box = await self._create(SandboxSpec(), PROBE_BOX_S)
            await box.close()
        except TimeoutError:
            return f"the Docker Engine answers, but no box starts in {PROBE_BOX_S:g} s; {remedy}"
        except (SandboxError, OSError) as error:
            return f"the Docker Engine answers, but no box starts ({' '.join(str(error).split())[:300]}); {remedy}"
        return None

    async def create(self, spec: SandboxSpec) -> Box:
        """A started container with its supervisor connected. Raises SandboxUnavailable or CapabilityError."""
        return await self._create(spec, ENGINE_TIMEOUT_S)

    async def _create(self, spec: SandboxSpec, engine_timeout_s: float) -> Box:
        host.check_files(spec)
        door, name = Door(), f"agentloop-{uuid.uuid4().hex[:12]}"
        try:
            with boundary(SandboxUnavailable, "docker cannot start a box", image=spec.image):
                await door.open()
                await _to_its_end(lambda: _start(spec, name, door.folder, engine_timeout_s))
            channel = await door.entered(lambda: asyncio.to_thread(_has_ended, name, engine_timeout_s))
        except BaseException as error:
            door.remove()
            await _to_its_end(lambda: _remove(name, engine_timeout_s))
            if isinstance(error, SandboxGone):
                raise SandboxUnavailable(f"docker started {spec.image!r}, but {error}; has it python3 3.8+?") from error
            raise
        return Box(name, self.isolation, channel, door, lambda: _remove(name, engine_timeout_s))


async def _to_its_end(work: Callable[[], None]) -> None:
    """Run `work` in a thread and wait for it even when cancelled: what it makes can only be removed after that."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        running.cancelled() or running.exception()
        raise


@contextmanager
def _engine(timeout_s: float = ENGINE_TIMEOUT_S) -> Iterator[Any]:
    """A client of one's own: the SDK's may not be used by two threads. Raises OSError when nobody listens."""
    import docker

    _knock(timeout_s)
    client = docker.from_env(timeout=timeout_s)
    try:
        yield client
    finally:
        client.close()


def _knock(timeout_s: float) -> None:
    """Connect once to an engine's unix socket; the SDK would leave its socket open where that fails."""
    from docker.constants import DEFAULT_UNIX_SOCKET
    from docker.utils import kwargs_from_env, parse_host

    url = parse_host(kwargs_from_env().get("base_url") or DEFAULT_UNIX_SOCKET)
    if url.startswith("http+unix://"):
        with socket.socket(socket.AF_UNIX) as knocking:
            knocking.settimeout(timeout_s)
            knocking.connect(url.removeprefix("http+unix://"))


def _start(spec: SandboxSpec, name: str, door: Path, engine_timeout_s: float) -> None:
    is_host = spec.image == "host"
    interpreter = host.python() if is_host else "python3"
    with _engine(engine_timeout_s) as client:
        _sweep(client)
        client.containers.create(
            _host_image(client) if is_host else _local_image(client, spec.image),
            # The whole command, or the image's own CMD would follow it.
            entrypoint=[interpreter, "-I", "-S", f"{host.INSIDE}/supervisor.py", f"{host.INSIDE}/door/s"],
            name=name,
            labels={OWNER: _owner()},
            auto_remove=True,
            mounts=_mounts(spec, door, is_host),
            tmpfs=_tmpfs(spec),
            working_dir="/work",
            user=_user(spec),
            hostname="sandbox",
            network_mode="none",
            read_only=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            pids_limit=MAX_PROCESSES,
            shm_size=f"{spec.scratch_mb}m",
            log_config={"type": "none"},
        ).start()


def _sweep(client: Any) -> None:
    """Remove boxes that were created but never started, because their owner was killed in between.

    A box that was started ends by itself when its owner does. Boxes of owners that cannot be seen from
    here (another machine's or container's processes, or a label of someone else's) are left alone.
    """
    from docker.errors import APIError

    for container in client.api.containers(all=True, filters={"label": OWNER, "status": "created"}):
        if _is_orphan(container["Labels"][OWNER]):
            with suppress(APIError):  # swept by someone else meanwhile
                client.api.remove_container(container["Id"], force=True)


def _owner(pid: int | None = None) -> str:
    """The label of what process `pid`, or this one, makes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{pid or os.getpid()}"


def _is_orphan(label: str) -> bool:
    """Whether the label names a process that would be seen from here, and is not there."""
    pid = label.rpartition("/")[2]
    if not (pid.isascii() and pid.isdecimal() and len(pid) < 10):
        return False
    return label == _owner(int(pid)) and not is_alive(int(pid))


def _host_image(client: Any) -> str:
    """An image with nothing in it but mount points, made once from an archive of empty folders."""
    from docker.errors import ImageNotFound

    try:
        client.images.get(HOST_IMAGE)
    except ImageNotFound:
        client.api.import_image_from_data(_empty_root(), repository=HOST_IMAGE, tag="latest")
    return HOST_IMAGE


def _local_image(client: Any, name: str) -> str:
    from docker.errors import ImageNotFound

    try:
        client.images.get(name)
    except ImageNotFound:
        raise CapabilityError(f"no local Docker image {name!r}; build or pull it, or use image = 'host'") from None
    return name


def _mounts(spec: SandboxSpec, door: Path, is_host: bool) -> list[Any]:
    from docker.types import Mount

    pairs = [(str(host.SUPERVISOR), f"{host.INSIDE}/supervisor.py"), (str(door), f"{host.INSIDE}/door")]
    if spec.files is not None:
        pairs.append((str(spec.files.resolve()), "/work" if spec.read_only else f"{host.INSIDE}/files"))
    if is_host:
        pairs += [(os.path.realpath(path), path) for path in [*host.read_only_paths(), *host.links()]]
    return [Mount(target, source, type="bind", read_only=True) for source, target in pairs]


def _tmpfs(spec: SandboxSpec) -> dict[str, str]:
    # The owner is named because runc replaces the mode by that of the folder below.
    uid, gid = _user(spec).split(":")
    options = f"size={spec.scratch_mb}m,mode=1777,uid={uid},gid={gid},exec"
    writable = ["/tmp"] if spec.files is not None and spec.read_only else ["/tmp", "/work"]  # noqa: S108 - the box's own
    return dict.fromkeys(writable, options)


def _user(spec: SandboxSpec) -> str:
    """uid:gid of the box: the files' owner when nobody else may read them, else one that owns nothing."""
    if spec.files is not None:
        about = spec.files.stat()
        if about.st_mode & 0o005 != 0o005:
            return f"{about.st_uid}:{about.st_gid}"
    return NOBODY_SPECIAL


def _empty_root() -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in ("work", "tmp", "run", "proc", "dev", "sys", "etc"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
    return archive.getvalue()


def _has_ended(name: str, engine_timeout_s: float) -> bool:
    from docker.errors import NotFound

    try:
        with _engine(engine_timeout_s) as client:
            return client.containers.get(name).status not in ("created", "running")
    except NotFound:
        return True


def _remove(name: str, engine_timeout_s: float) -> None:
    """End and remove; one that is going by itself is waited for, an engine that stopped runs nothing."""
    from docker.errors import APIError, DockerException, NotFound

    try:
        with _engine(engine_timeout_s) as client:
            container = client.containers.get(name)
            try:
                container.remove(force=True)
            except APIError as error:
                if error.status_code != 409:
                    raise
                container.wait(condition="removed", timeout=REMOVE_TIMEOUT_S)
    except NotFound:
        return
    except APIError:
        raise
    except (DockerException, OSError):
        return


def _explained(error: Exception) -> str:
    """Why no engine answered, in one line with the remedy."""
    problem = " ".join(str(error).split())[:160]
    if "Permission denied" in problem:
        return f"this user may not use the Docker Engine ({problem}); join the group docker, or use bubblewrap"
    return f"no Docker Engine answers ({problem}); start one, or use bubblewrap"
