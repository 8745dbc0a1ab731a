"""Follower processes of one training on this machine: each repeats the first process's calls on its copy of the model.

The first process rolls out, judges, publishes and decides. It sends each of its calls that touch the model, and the
end. The followers compute their share of the rows. They write no files and talk only to the first process.
`distributed.py` contains the arithmetic.

    python -m agentloop.train.followers RANK SIZE PORT N_THREADS
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from agentloop.errors import AgentLoopError, TrainingError
from agentloop.train import state
from agentloop.train.algorithms.algorithm import Algorithm, Need
from agentloop.train.distributed import ALONE, Ranks, leave_group
from agentloop.train.engine import Engine, EngineSettings
from agentloop.train.model import Trainable
from agentloop.train.probes import make_probe

LOCAL = "127.0.0.1"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""Name of the loopback interface."""
START = timedelta(minutes=5)
"""Time limit for all processes to start: each loads torch."""
PATIENCE = timedelta(days=1)
"""Time limit between two calls, during which the first process rolls out. If it is gone, the others end at once."""
END_S = 30.0
"""Seconds in which a process must end after the END call."""


@dataclass(frozen=True)
class Recipe:
    """The arguments with which every process creates its engine."""

    load: Mapping[str, Any]
    """Arguments of `Trainable.load`."""
    algorithm: Algorithm
    settings: EngineSettings


CALLS: Mapping[str, Callable[..., object]] = {
    "prepared": lambda engine, *arguments: engine.prepared(*arguments),
    "score": lambda engine, *arguments: engine.score(*arguments),
    "step": lambda engine, *arguments: engine.step(*arguments),
    "state": lambda engine: engine.trainable.state(),
    "make_probe": lambda engine, *arguments, **options: make_probe(engine.trainable, *arguments, **options),
    "load_state": lambda engine, tensors: engine.trainable.load_state(tensors),
    "save_model": lambda engine, folder: engine.trainable.save(folder),
    "save": state.save,
    "checkpoint": state.checkpoint,
    "restore": state.restore,
    "wait": lambda engine: engine.ranks.wait(),
}
Call: TypeAlias = tuple[str, Sequence[Any], Mapping[str, Any]]
"""(name, arguments, keyword arguments)."""
END: Call = ("", (), {})


class Leader(Ranks):
    """The first process: the others repeat each of its `together` blocks."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)
        self._is_inside = False

    @contextmanager
    def together(self, name: str, *arguments: Any, **options: Any) -> Iterator[None]:
        """See `Ranks.together`. A nested block is part of the outer one."""
        if self._is_inside:
            yield
            return
        self._is_inside = True
        try:
            self.from_first((name, arguments, options))
            yield
        finally:
            self._is_inside = False

    def wait(self) -> None:
        """See `Ranks.wait`."""
        with self.together("wait"):
            super().wait()


@contextmanager
def leading(n_processes: int) -> Iterator[Ranks]:
    """Start the other processes of a training, and end them after the block.

    Raises TrainingError with the last line of output of a process that ended too early.
    """
    if n_processes == 1:
        yield ALONE
        return
    # A store that opens its own port listens on every interface, and ranks exchange pickles without authentication.
    listener = socket.create_server((LOCAL, 0))
    port = listener.getsockname()[1]
    descriptor = listener.detach()
    # The other processes start below, so this call must not wait for them.
    store = TCPStore(LOCAL, port, n_processes, True, START, wait_for_workers=False, master_listen_fd=descriptor)
    numbers = [str(n_processes), str(store.port), str(torch.get_num_threads())]
    with ExitStack() as stack:
        started = [stack.enter_context(_started([str(rank), *numbers])) for rank in range(1, n_processes)]
        try:
            with _group(store, 0, n_processes):
                leader = Leader(n_processes)
                yield leader
                leader.from_first(END)
                for each in started:
                    # One that does not end is killed where the stack closes.
                    with suppress(subprocess.TimeoutExpired):
                        each.process.wait(END_S)
        except RuntimeError as error:
            # TrainingError is a RuntimeError, too, and has its own message.
            if isinstance(error, AgentLoopError):
                raise
            raise TrainingError(
                f"the {n_processes} processes of the training parted ({_last_words(started) or error}); "
                "run the same command again"
            ) from error


class Follower(NamedTuple):
    """A process and its stderr."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]


@contextmanager
def _started(numbers: Sequence[str]) -> Iterator[Follower]:
    with TemporaryFile() as log:
        command = [sys.executable, "-m", __name__, *numbers]
        process = subprocess.Popen(command, stderr=log, start_new_session=True)  # Ctrl-C is for the first one
        try:
            yield Follower(process, log)
        finally:
            process.kill()  # it may wait for a call that never comes
            process.wait()


def _last_words(started: Sequence[Follower]) -> str:
    """The last line on stderr of the first process that ended by itself."""
    for each in started:
        with suppress(subprocess.TimeoutExpired):
            # The process whose death parted the others may still be ending.
            if each.process.wait(1.0):
                each.log.seek(0)
                lines = each.log.read().decode(errors="replace").strip().splitlines()
                return lines[-1][:300] if lines else f"status {each.process.returncode}"
    return ""


def begin(ranks: Ranks, recipe: Recipe) -> None:
    """Let the other processes create their engines while this one creates its own, in the same way."""
    if ranks.size > 1:
        ranks.from_first(recipe)


def follow(rank: int, size: int, port: int) -> None:
    """Repeat the calls of the first process until it sends END."""
    store = TCPStore(LOCAL, port, size, False, START)
    with _group(store, rank, size):
        ranks = Ranks(rank, size)
        recipe: Recipe = ranks.from_first(None)  # type: ignore[assignment]
        trainable = Trainable.load(**recipe.load)
        if Need.reference in recipe.algorithm.needs:
            trainable.keep_reference()
        engine = Engine(trainable, recipe.algorithm, recipe.settings, ranks=ranks)
        while True:
            name, arguments, options = ranks.from_first(END)
            if not name:
                return
            CALLS[name](engine, *arguments, **options)


@contextmanager
def _group(store: Store, rank: int, size: int) -> Iterator[None]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # gloo would listen on the address of the host name
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
        # Objects and counts travel by gloo, gradients on GPUs by NCCL.
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    try:
        yield
    finally:
        leave_group()


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[4]))
    follow(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
