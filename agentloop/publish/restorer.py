"""Gives a server its weights back when the process that replaces them is killed.

    python -m agentloop.publish.restorer        # reads an order, then waits for the end of its input

The process outlives the one that trains. If its input ends without RELEASED, it reloads the weights of before, which
also resumes a server that was paused in the middle of a reload.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from pydantic import SecretStr

from agentloop.errors import PublishError
from agentloop.publish.full import FullReload
from agentloop.types import Frozen

RELEASED = "released"
END_S = 30.0
"""Seconds in which the process must end after RELEASED."""


class Order(Frozen):
    """The weights to restore, as one line of JSON. A pipe carries it, because other users can read arguments."""

    base_url: str
    model: str
    folder: Path
    """Weights that the server gets back."""
    api_key: str | None = None


class Restorer:
    """The process, seen from the one that trains."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def start(self, order: Order) -> None:
        """Start it before weights are replaced. Does nothing if it runs."""
        if self._process is not None:
            return
        command = [sys.executable, "-m", __name__]
        # In a session of its own: Ctrl-C is for the process that trains, which restores the weights itself.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        self._say(order.model_dump_json())

    def release(self) -> None:
        """End it: the server has its weights again, or the user was told that it has not."""
        if self._process is None:
            return
        self._say(RELEASED)
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _say(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it was killed, too
                self._process.stdin.write(f"{line}\n")
                # In our buffer, the order would be lost with this process when it is killed.
                self._process.stdin.flush()


def main() -> None:
    """Wait for the release; restore if the other end closes without one."""
    line = sys.stdin.readline()
    if not line:  # the trainer was killed before it replaced anything
        return
    order = Order.model_validate_json(line)
    if sys.stdin.readline().strip() == RELEASED:
        return
    key = None if order.api_key is None else SecretStr(order.api_key)
    publisher = FullReload(order.base_url, order.model, order.folder, api_key=key)
    with suppress(PublishError):  # a server that is gone has nothing to restore
        asyncio.run(publisher.reload(order.folder))


if __name__ == "__main__":
    main()
