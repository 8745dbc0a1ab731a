"""A task's image as a root folder, for backends that build none: an engine makes it once, elsewhere it is run."""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from agentloop.errors import ImageError, SandboxUnavailable, boundary
from agentloop.harbor.run import refuse_images
from agentloop.harbor.task import HarborTask
from agentloop.protocols import SandboxBackend
from agentloop.sandbox.builds import in_engine
from agentloop.sandbox.docker import DockerBackend
from agentloop.sandbox.engine import engine
from agentloop.sandbox.images import ImageKind, kind

LEFT_OUT = ("dev/", "proc/", "sys/")


def for_backend(tasks: Sequence[HarborTask], backend: SandboxBackend, folder: Path) -> list[HarborTask]:
    """The tasks as `backend` takes them: where it builds no images, an engine does, and they are unpacked in `folder`.

    Raises CapabilityError when there is no engine either, ImageError, SandboxUnavailable. Blocks.
    """
    if backend.name == DockerBackend.name:
        return list(tasks)
    if DockerBackend().probe() is not None:
        refuse_images(tasks, backend)
    engine_s = (ImageKind.recipe, ImageKind.tag)
    return [
        with_root_folder(task, folder / f"{n}-{task.name}") if kind(task.image) in engine_s else task
        for n, task in enumerate(tasks)
    ]


def with_root_folder(task: HarborTask, folder: Path) -> HarborTask:
    """The task with its image unpacked to the new `folder`, built by the Docker Engine when it has to be.

    Special permissions and devices are not kept. Raises ImageError, SandboxUnavailable. Blocks.
    """
    with boundary(SandboxUnavailable, "docker"), engine() as client:
        image, settings = in_engine(client, task.image)
        made = client.api.create_container(image, command=["/bin/sh"])["Id"]
        try:
            with tempfile.TemporaryFile() as packed:
                for piece in client.api.export(made):
                    packed.write(piece)
                packed.seek(0)
                _unpack(packed, folder)
        finally:
            client.api.remove_container(made, force=True)
    workdir = task.environment.workdir or settings["Config"].get("WorkingDir") or "/"
    environment = task.environment.model_copy(update={"docker_image": str(folder), "workdir": workdir})
    return task.model_copy(update={"environment": environment})


def _unpack(packed: object, folder: Path) -> None:
    folder.mkdir(parents=True)
    with boundary(ImageError, f"{folder}: cannot be unpacked"), tarfile.open(fileobj=packed, mode="r:") as archive:  # type: ignore[call-overload]
        for entry in archive:
            if not (entry.isdev() or entry.name.startswith(LEFT_OUT)):
                entry.mode = entry.mode & 0o777 | 0o600 if not entry.isdir() else entry.mode & 0o777 | 0o700
                archive.extract(entry, folder, filter="fully_trusted")
    for name in LEFT_OUT:
        (folder / name).mkdir(exist_ok=True)
