"""Real MCP servers: a public one made ready for a sandbox, and one of the SDK's by HTTP in a process of its own."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from parts import lacking

HTTP = """
import asyncio, os, sys
from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("web")

@server.tool()
def add(a: int, b: int) -> int:
    return a + b

@server.tool()
def whoami(ctx: Context) -> str:
    return ctx.headers.get("authorization", "nobody") if ctx.headers else "nobody"

@server.tool()
def refuse() -> str:
    raise ValueError("not today")

@server.tool()
async def slow() -> str:
    await asyncio.sleep(60)
    return "at last"

@server.tool()
async def grow(ctx: Context) -> str:
    server.add_tool(lambda: "grown", name="grown")
    await ctx.notify_tools_changed()
    return "one more"

@server.tool()
def exit() -> str:
    os._exit(1)

server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
"""


def installed(package: str) -> Path:
    """A folder with `package` and all that it needs, for this Python; kept in the environment that runs the tests."""
    folder = Path(
        sys.prefix, "environments", f"{package.split('=')[0]}-{hashlib.sha256(package.encode()).hexdigest()[:8]}"
    )
    if not folder.exists():
        # Made beside its place and moved there whole: two workers may want it at once.
        folder.parent.mkdir(exist_ok=True)
        made = Path(mkdtemp(dir=folder.parent))
        made.chmod(0o755)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--ignore-installed", "--target", str(made), package]
        done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=500)
        try:
            if done.returncode != 0:
                lacking(f"{package} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
            made.rename(folder)
        except OSError:
            assert folder.exists()  # the other worker's
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


@contextmanager
def serving() -> Iterator[str]:
    """The URL of a server that has a few tools."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen([sys.executable, "-c", HTTP, str(port)], stderr=subprocess.DEVNULL, env=quiet)
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()
