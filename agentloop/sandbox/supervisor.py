"""PID 1 of a box: runs commands for the host over one connection, and ends with it.

One file, standard library only, Python 3.8 or newer: it is mounted into the box and started there
with `python3 -I -S`. It opens no port and trusts nothing that a command prints: frames travel on
the connection, output travels on pipes. When the host is gone, so is the connection, and with
PID 1 the kernel ends every process of the box. All leases of a box are one user: they are told
apart by a folder and by a mark in the environment, so a process that leaves its session and clears
its environment lives on until the box ends.

Frame: id (u32), kind (u8), length (u32), then that many bytes; big-endian. READY has nothing in it,
or why the box cannot be used; EXEC a REQUEST, DONE a RESULT with what follows them; DISCARD a lease,
or under a request's id nothing, which is then given up.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress

HEADER = struct.Struct(">IBI")
REQUEST = struct.Struct(">IIH")  # timeout ms, bytes kept of each stream, length of the lease's name
RESULT = struct.Struct(">iBIII")  # exit code, timed out, bytes dropped, duration us, length of stdout
READY, EXEC, DISCARD, DONE = range(4)

HARD_CAP, FLOOD = 8, 1 << 20
"""A command is killed once it has printed this many times what is kept, and at least this many bytes."""
TERM_S = 0.1
"""How long a command whose time is up gets to end by itself; then its group is killed."""
MAX_PASSES = 10
"""Sweeps over /proc for what a lease left: each catches what was forked during the one before."""
FILES, WORK, SCRATCH = "/run/agentloop/files", "/work", "/tmp"  # noqa: S108 - the box's own
KILLED = 128 + signal.SIGKILL
CANNOT_START = 126
PR_SET_DUMPABLE = 4


class Stream:
    """One pipe of a command: its first and last bytes, and how many were left out between them."""

    def __init__(self, fd: int, keep: int) -> None:
        self.fd, self.half, self.total = fd, max(1, keep // 2), 0
        self.head, self.tail = bytearray(), bytearray()

    def take(self, data: bytes) -> None:
        self.total += len(data)
        room = self.half - len(self.head)
        self.head += data[:room] if room > 0 else b""
        self.tail += data[max(room, 0) :]
        if len(self.tail) > 2 * self.half:
            del self.tail[: -self.half]

    def kept(self) -> tuple[bytes, int]:
        """(bytes, number dropped)."""
        tail = bytes(self.tail[-self.half :])
        dropped = self.total - len(self.head) - len(tail)
        return bytes(self.head) + (b"\n[...]\n" if dropped else b"") + tail, dropped


class Command:
    """A running `sh -c`, in a session and process group of its own."""

    def __init__(self, ident: int, timeout_ms: int, keep: int, lease: str, text: bytes) -> None:
        """Starts it. Raises OSError when that is not possible, a text of 128 KiB or more included."""
        self.ident, self.lease = ident, lease
        self.cap = max(HARD_CAP * keep, FLOOD)
        self.started = time.monotonic()
        self.deadline = self.started + timeout_ms / 1000.0
        self.timed_out = self.flooded = False
        home = f"{SCRATCH}/{lease}"
        with suppress(OSError):  # it is there; or the scratch is full, which is for the command to find out
            os.mkdir(home)
        self.pid, out, err = spawn(text, environment(home, lease))
        self.streams = (Stream(out, keep), Stream(err, keep))

    def kill(self, number: int = signal.SIGKILL) -> None:
        """The whole group, which the shell cannot leave: it leads a session."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def spawn(text: bytes, variables: dict[str, str]) -> tuple[int, int, int]:
    """(pid, stdout, stderr) of a new `sh -c`; the two are ends of pipes that never block."""
    pipes: list[int] = []
    try:
        pipes += os.pipe2(os.O_CLOEXEC)
        pipes += os.pipe2(os.O_CLOEXEC)
        pid = os.posix_spawn(
            "/bin/sh",
            [b"sh", b"-c", text],
            variables,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, pipes[1], 1),
                (os.POSIX_SPAWN_DUP2, pipes[3], 2),
            ],
            setsid=True,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # which Python ignores, and a child would inherit that
        )
    except BaseException:
        for fd in pipes[::2]:
            os.close(fd)
        raise
    finally:
        for fd in pipes[1::2]:
            os.close(fd)
    os.set_blocking(pipes[0], False)
    os.set_blocking(pipes[2], False)
    return pid, pipes[0], pipes[2]


def environment(home: str, lease: str) -> dict[str, str]:
    """What the image sets (nothing of the host's gets here), then ours."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        **os.environ,
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "AGENTLOOP_LEASE": lease,
    }


class Supervisor:
    """Starts commands up to a limit, watches them, answers in the order in which they end."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.epoll = select.epoll()
        self.incoming, self.outgoing = bytearray(), bytearray()
        self.wanted = select.EPOLLIN
        self.queue: list[tuple[int, bytes]] = []
        self.running: dict[int, Command] = {}
        self.pipes: dict[int, tuple[Command, Stream]] = {}
        self.n_removed = 0
        self.limit = 2 * (os.cpu_count() or 1)
        self.wake_r, wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        # Python's own handler would let a command end PID 1; without one the kernel protects it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def run(self) -> None:
        self.connection.setblocking(False)
        self.epoll.register(self.connection, self.wanted)
        self.epoll.register(self.wake_r, select.EPOLLIN)
        self.send(0, READY, b"")
        while True:
            ended = False
            for fd, events in self.epoll.poll(self.patience()):
                if fd in self.pipes:
                    self.read(*self.pipes[fd])
                elif fd == self.wake_r:
                    os.read(fd, 4096)
                    ended = True
                elif fd == self.connection.fileno():
                    if events & ~select.EPOLLOUT:
                        self.receive()
                    self.flush()
            if ended:
                self.reap()
            self.expire()
            self.start()

    def patience(self) -> float | None:
        """Seconds until the next deadline; None when nothing runs."""
        if not self.running:
            return None
        return max(0.0, min(c.deadline for c in self.running.values()) - time.monotonic())

    # ------------------------------------------------------------------ the connection

    def receive(self) -> None:
        try:
            data = self.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            os._exit(0)
        self.incoming += data
        while len(self.incoming) >= HEADER.size:
            ident, kind, length = HEADER.unpack_from(self.incoming)
            if len(self.incoming) < HEADER.size + length:
                return
            payload = bytes(self.incoming[HEADER.size : HEADER.size + length])
            del self.incoming[: HEADER.size + length]
            if kind == EXEC:
                self.queue.append((ident, payload))
            elif kind == DISCARD and ident:
                self.cancel(ident)
            elif kind == DISCARD:
                self.discard(payload.decode())

    def send(self, ident: int, kind: int, payload: bytes) -> None:
        self.outgoing += HEADER.pack(ident, kind, len(payload)) + payload
        self.flush()

    def flush(self) -> None:
        if self.outgoing:
            try:
                sent = self.connection.send(self.outgoing)
                del self.outgoing[:sent]
            except BlockingIOError:
                pass
            except OSError:
                os._exit(0)
        wanted = select.EPOLLIN | (select.EPOLLOUT if self.outgoing else 0)
        if wanted != self.wanted:
            self.wanted = wanted
            self.epoll.modify(self.connection, wanted)

    # -------------------------------------------------------------------- the commands

    def start(self) -> None:
        while self.queue and len(self.running) < self.limit:
            ident, payload = self.queue.pop(0)
            timeout_ms, keep, n = REQUEST.unpack_from(payload)
            text = payload[REQUEST.size + n :]
            try:
                command = Command(ident, timeout_ms, keep, lease_of(payload), text)
            except (OSError, ValueError) as error:
                self.answer(ident, CANNOT_START, False, 0, 0.0, b"", f"cannot start: {error}\n".encode())
                continue
            self.running[command.pid] = command
            for stream in command.streams:
                self.pipes[stream.fd] = (command, stream)
                self.epoll.register(stream.fd, select.EPOLLIN)

    def read(self, command: Command, stream: Stream) -> bool:
        """Take what a pipe has; False when there is nothing more for now."""
        try:
            data = os.read(stream.fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self.close(stream)
            return False
        stream.take(data)
        if stream.total > command.cap:
            command.flooded = True
            command.kill()
        return True

    def close(self, stream: Stream) -> None:
        if stream.fd >= 0:
            del self.pipes[stream.fd]
            os.close(stream.fd)  # which takes it out of the epoll set, too
            stream.fd = -1

    def reap(self) -> None:
        """Collect every child that ended, orphans too; a command is over when its shell is."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            command = self.running.pop(pid, None)
            if command:
                self.finish(command, status)

    def finish(self, command: Command, status: int) -> None:
        if command.timed_out:
            command.kill()  # those of its group that outlived the shell
        for stream in command.streams:
            # What a surviving child writes later is nobody's: the pipe is drained and closed.
            while stream.fd >= 0 and stream.total <= command.cap and self.read(command, stream):
                pass
            self.close(stream)
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        (out, lost_out), (err, lost_err) = (stream.kept() for stream in command.streams)
        if command.flooded:
            err += f"[killed: it printed more than {command.cap} bytes]\n".encode()
        elapsed = time.monotonic() - command.started
        self.answer(command.ident, code, command.timed_out, lost_out + lost_err, elapsed, out, err)

    def answer(
        self, ident: int, code: int, timed_out: bool, dropped: int, elapsed: float, out: bytes, err: bytes
    ) -> None:
        micros = min(int(elapsed * 1e6), 0xFFFFFFFF)
        self.send(ident, DONE, RESULT.pack(code, timed_out, min(dropped, 0xFFFFFFFF), micros, len(out)) + out + err)

    def expire(self) -> None:
        now = time.monotonic()
        for command in self.running.values():
            if command.deadline <= now:
                command.kill(signal.SIGKILL if command.timed_out else signal.SIGTERM)
                command.timed_out = True
                command.deadline = now + TERM_S

    def discard(self, lease: str) -> None:
        """End what a lease left running and remove what it left lying."""
        waiting, self.queue = self.queue, []
        for ident, payload in waiting:
            if lease_of(payload) == lease:
                self.answer(ident, KILLED, False, 0, 0.0, b"", b"discarded before it started\n")
            else:
                self.queue.append((ident, payload))
        for command in self.running.values():
            if command.lease == lease:
                command.kill()
        mark = f"AGENTLOOP_LEASE={lease}".encode()
        for _ in range(MAX_PASSES):
            if not kill_marked(mark):
                break
        self.remove(f"{SCRATCH}/{lease}")

    def remove(self, path: str) -> None:
        """At once when the folder is empty, else by a child: a large or deep one must hold up nobody."""
        try:
            os.rmdir(path)
        except FileNotFoundError:
            return
        except OSError:
            self.n_removed += 1
            aside = f"{SCRATCH}/.discarded-{self.n_removed}"
            with suppress(OSError):  # a box that is this full can still be closed
                os.rename(path, aside)
                text = f"exec 2>/dev/null; chmod -R u+rwx {aside}; rm -rf {aside}"
                _, *pipes = spawn(text.encode(), environment(SCRATCH, ""))
                for fd in pipes:
                    os.close(fd)

    def cancel(self, ident: int) -> None:
        """End one request, whose answer nobody waits for any more."""
        self.queue = [item for item in self.queue if item[0] != ident]
        for command in self.running.values():
            if command.ident == ident:
                command.kill()


def lease_of(payload: bytes) -> str:
    n = REQUEST.unpack_from(payload)[2]
    return payload[REQUEST.size : REQUEST.size + n].decode()


def kill_marked(mark: bytes) -> int:
    """SIGKILL to every other process with `mark` in its environment; how many there were."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    found = [pid for pid in pids if pid != os.getpid() and mark in variables_of(pid)]
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


def variables_of(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as handle:
            return handle.read().split(b"\0")
    except OSError:
        return []


def protect() -> None:
    """Keep commands, which run as the same user, out of this process's memory."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass  # an interpreter without ctypes; the box's own isolation does not rest on it


def fill_work() -> None:
    """Copy the files into the writable /work. Raises OSError with what `cp` said about it."""
    text = f"cp -RPp {FILES}/. {WORK} && chmod u+rwx {WORK}"
    pid, out, err = spawn(text.encode(), environment(SCRATCH, ""))
    os.close(out)
    os.set_blocking(err, True)
    with os.fdopen(err, "rb") as said:
        words = said.read().decode(errors="replace").splitlines()
    if os.waitpid(pid, 0)[1]:
        raise OSError(f"cannot fill {WORK}: {words[0] if words else 'cp failed'}")


def main() -> None:
    protect()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    try:
        if os.path.isdir(FILES):
            fill_work()
        os.chdir(WORK)
    except OSError as error:
        reason = str(error).encode()
        connection.sendall(HEADER.pack(0, READY, len(reason)) + reason)
        return
    Supervisor(connection).run()


if __name__ == "__main__":
    main()
