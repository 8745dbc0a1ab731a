"""A private Redis server on a free port of this machine, for the duration of a block. It can be killed and started."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REMEDY = "`apt install redis-server` (its program is enough, no service is needed)"
# Seconds to wait for the first connection.
START_S = 20.0


def is_installed() -> bool:
    """Whether there is a server to start."""
    return shutil.which("redis-server") is not None


class RedisServer:
    """A server that keeps nothing on disk."""

    def __init__(self, folder: Path, *options: str, tls: bool = False) -> None:
        """options: more words of its command line. Raises FileNotFoundError if Redis is not installed."""
        if not is_installed():
            raise FileNotFoundError(f"no Redis here. Remedy: {REMEDY}")
        with socket.socket() as listener:
            # The port is free again before Redis takes it, so another process can take it first.
            listener.bind(("127.0.0.1", 0))
            self.port: int = listener.getsockname()[1]
        self._words = ["redis-server", "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
        self._words += ["--tls-port" if tls else "--port", str(self.port), *options]
        self._scheme = "rediss" if tls else "redis"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL of its first database."""
        return f"{self._scheme}://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it, and wait until it accepts connections."""
        self._process = subprocess.Popen(self._words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ends_at = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > ends_at:
                raise RuntimeError(f"redis-server did not start: {' '.join(self._words)}")
            time.sleep(0.02)

    def kill(self) -> None:
        """`kill -9`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True


@contextmanager
def redis_server(*options: str, tls: bool = False) -> Iterator[RedisServer]:
    """A server that runs. Raises FileNotFoundError if Redis is not installed."""
    with tempfile.TemporaryDirectory(prefix="al-redis-") as name:
        server = RedisServer(Path(name), *options, tls=tls)
        server.start()
        try:
            yield server
        finally:
            server.kill()
