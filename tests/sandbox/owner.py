"""A process that owns a box and waits to be killed: `python -m tests.sandbox.owner BACKEND MARK`.

Prints `ready NAME` once a command that has MARK on its command line runs in the box.
"""

from __future__ import annotations

import asyncio
import sys

from agentloop.plugins import load_part
from agentloop.protocols import SandboxBackend
from agentloop.sandbox.pool import SandboxPool
from agentloop.types import SandboxSpec


async def main(kind: str, mark: str) -> None:
    backend: SandboxBackend = load_part("sandboxes", kind)
    async with SandboxPool(backend).lease(SandboxSpec(), "owner") as box:
        await box.exec(f"setsid sleep {mark} & sleep 0.1")
        print("ready", box.id, flush=True)
        await box.exec(f"sleep {mark}", timeout_s=60.0)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
