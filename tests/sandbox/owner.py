"""A process that owns boxes and waits to be killed: `python -m tests.sandbox.owner BACKEND MARK [N [IMAGE]]`.

The files of an IMAGE can be written. Prints `ready NAME...` once two commands that have MARK on their
command line run in each box.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from agentloop.plugins import load_part
from agentloop.protocols import Sandbox, SandboxBackend
from agentloop.sandbox import cgroups
from agentloop.types import SandboxSpec


async def main(kind: str, mark: str, n: str = "1", image: str = "host") -> None:
    backend: SandboxBackend = load_part("sandboxes", kind)
    limits: dict[str, Any] = {"root": image != "host"}  # so that there are mounts and groups which could stay
    if kind != "docker" or image == "host":
        limits["scratch_files"] = 1000
    if kind == "docker" or all(cgroups.find(name) for name in cgroups.LIMITS.values()):
        limits.update(memory_mb=256, n_processes=64, cpus=1.0)
    spec = SandboxSpec(image=image, **limits)
    boxes: list[Sandbox] = await asyncio.gather(*(backend.create(spec) for _ in range(int(n))))
    await asyncio.gather(*(box.exec(f"$(command -v setsid) sleep {mark} & sleep 0.1") for box in boxes))
    print("ready", *(box.id for box in boxes), flush=True)
    await asyncio.gather(*(box.exec(f"sleep {mark}", timeout_s=60.0) for box in boxes))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
