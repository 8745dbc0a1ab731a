"""PID 1 of a box: runs commands for the host over one connection, and ends with it.

One file, standard library only, Python 3.8 or newer: it is mounted into the box and started there
with `python3 -I -S`. It opens no port and trusts nothing that a command prints: frames travel on
the connection, output travels on pipes. When the host is gone, so is the connection, and with
PID 1 the kernel ends every process of the box.

Frame: id (u32), kind (u8), length (u32), then that many bytes; big-endian.
"""

import os
import selectors
import shutil
import signal
import socket
import struct
import sys
import time

HEADER = struct.Struct(">IBI")
REQUEST = struct.Struct(">IIH")  # timeout ms, bytes kept of each stream, length of the lease's name
RESULT = struct.Struct(">iBIII")  # exit code, timed out, bytes dropped, duration us, length of stdout
READY, EXEC, DISCARD, DONE = range(4)

HARD_CAP = 8
"""A command that prints this many times what is kept is killed."""
FILES, WORK, SCRATCH = "/run/agentloop/files", "/work", "/tmp"
PR_SET_DUMPABLE = 4


class Stream:
    """One pipe of a command: its first and last bytes, and how many were left out between them."""

    def __init__(self, fd, keep):
        self.fd, self.half, self.total = fd, max(1, keep // 2), 0
        self.head, self.tail = bytearray(), bytearray()

    def take(self, data):
        self.total += len(data)
        room = self.half - len(self.head)
        self.head += data[:room] if room > 0 else b""
        self.tail += data[max(room, 0) :]
        if len(self.tail) > 2 * self.half:
            del self.tail[: -self.half]

    def kept(self):
        """(bytes, number dropped)."""
        tail = bytes(self.tail[-self.half :])
        dropped = self.total - len(self.head) - len(tail)
        return bytes(self.head) + (b"\n[...]\n" if dropped else b"") + tail, dropped


class Command:
    """A running `sh -c`, in a session and process group of its own."""

    def __init__(self, ident, timeout_ms, keep, lease, text):
        self.ident, self.lease, self.keep = ident, lease, keep
        self.started = time.monotonic()
        self.deadline = self.started + timeout_ms / 1000.0
        self.timed_out = False
        home = "{}/{}".format(SCRATCH, lease)
        os.makedirs(home, exist_ok=True)
        out_r, out_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        err_r, err_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for fd in (out_w, err_w):
            os.set_blocking(fd, True)
        try:
            self.pid = os.posix_spawn(
                "/bin/sh",
                ["sh", "-c", text],
                environment(home, lease),
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, out_w, 1),
                    (os.POSIX_SPAWN_DUP2, err_w, 2),
                ],
                setsid=True,
                setsigdef=[signal.SIGPIPE],
            )
        finally:
            os.close(out_w)
            os.close(err_w)
        self.streams = [Stream(out_r, keep), Stream(err_r, keep)]

    def kill(self):
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def environment(home, lease):
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "AGENTLOOP_LEASE": lease,
    }


class Supervisor:
    """Starts commands up to a limit, watches them, answers in the order in which they end."""

    def __init__(self, connection):
        self.connection = connection
        self.selector = selectors.DefaultSelector()
        self.incoming, self.outgoing = bytearray(), bytearray()
        self.queue, self.running = [], {}
        self.limit = 2 * (os.cpu_count() or 1)
        self.wake_r, wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)

    def run(self):
        self.connection.setblocking(False)
        self.selector.register(self.connection, selectors.EVENT_READ, None)
        self.selector.register(self.wake_r, selectors.EVENT_READ, None)
        self.send(0, READY, b"")
        while True:
            for key, events in self.selector.select(self.patience()):
                if key.fileobj is self.connection:
                    if events & selectors.EVENT_READ:
                        self.receive()
                    self.flush()
                elif key.fileobj == self.wake_r:
                    os.read(self.wake_r, 4096)
                else:
                    self.read(*key.data)
            self.reap()
            self.expire()
            self.start()

    def patience(self):
        """Seconds until the next deadline; None when nothing runs."""
        if not self.running:
            return None
        return max(0.0, min(c.deadline for c in self.running.values()) - time.monotonic())

    # ------------------------------------------------------------------ the connection

    def receive(self):
        try:
            data = self.connection.recv(1 << 16)
        except BlockingIOError:
            return
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
            elif kind == DISCARD:
                self.discard(payload.decode())

    def send(self, ident, kind, payload):
        self.outgoing += HEADER.pack(ident, kind, len(payload)) + payload
        self.flush()

    def flush(self):
        if self.outgoing:
            try:
                sent = self.connection.send(self.outgoing)
                del self.outgoing[:sent]
            except BlockingIOError:
                pass
            except OSError:
                os._exit(0)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.outgoing else 0)
        if self.selector.get_key(self.connection).events != wanted:
            self.selector.modify(self.connection, wanted, None)

    # -------------------------------------------------------------------- the commands

    def start(self):
        while self.queue and len(self.running) < self.limit:
            ident, payload = self.queue.pop(0)
            timeout_ms, keep, n = REQUEST.unpack_from(payload)
            lease = payload[REQUEST.size : REQUEST.size + n].decode()
            try:
                command = Command(ident, timeout_ms, keep, lease, payload[REQUEST.size + n :])
            except (OSError, ValueError) as error:
                self.answer(ident, 126, False, 0, 0.0, b"", "cannot start: {}\n".format(error).encode())
                continue
            self.running[command.pid] = command
            for stream in command.streams:
                self.selector.register(stream.fd, selectors.EVENT_READ, (command, stream))

    def read(self, command, stream):
        """Take what a pipe has; False at its end."""
        try:
            data = os.read(stream.fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self.close(stream)
            return False
        stream.take(data)
        if stream.total > HARD_CAP * command.keep:
            command.kill()
        return True

    def close(self, stream):
        if stream.fd >= 0:
            self.selector.unregister(stream.fd)
            os.close(stream.fd)
            stream.fd = -1

    def reap(self):
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

    def finish(self, command, status):
        for stream in command.streams:
            # What a surviving child writes later is nobody's: the pipe is drained and closed.
            while stream.fd >= 0 and stream.total <= HARD_CAP * command.keep and self.read(command, stream):
                pass
            self.close(stream)
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        (out, lost_out), (err, lost_err) = (stream.kept() for stream in command.streams)
        elapsed = time.monotonic() - command.started
        self.answer(command.ident, code, command.timed_out, lost_out + lost_err, elapsed, out, err)

    def answer(self, ident, code, timed_out, dropped, elapsed, out, err):
        micros = min(int(elapsed * 1e6), 0xFFFFFFFF)
        self.send(ident, DONE, RESULT.pack(code, timed_out, min(dropped, 0xFFFFFFFF), micros, len(out)) + out + err)

    def expire(self):
        now = time.monotonic()
        for command in list(self.running.values()):
            if not command.timed_out and command.deadline <= now:
                command.timed_out = True
                command.kill()
                # Should the shell have left its group, its answer must still come soon.
                command.deadline = now + 0.2
            elif command.timed_out and command.deadline <= now:
                os.kill(command.pid, signal.SIGKILL)
                command.deadline = now + 0.2

    def discard(self, lease):
        """End what a lease left running and remove what it left lying."""
        self.queue = [item for item in self.queue if not self.belongs(item[1], lease)]
        for command in self.running.values():
            if command.lease == lease:
                command.kill()
        mark = "AGENTLOOP_LEASE={}".format(lease).encode()
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        if len(pids) > 1:
            for pid in pids:
                if pid != os.getpid() and mark in environ(pid):
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
        shutil.rmtree("{}/{}".format(SCRATCH, lease), ignore_errors=True)

    @staticmethod
    def belongs(payload, lease):
        n = REQUEST.unpack_from(payload)[2]
        return payload[REQUEST.size : REQUEST.size + n].decode() == lease


def environ(pid):
    try:
        with open("/proc/{}/environ".format(pid), "rb") as handle:
            return handle.read().split(b"\0")
    except OSError:
        return []


def protect():
    """Keep commands, which run as the same user, out of this process's memory."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass  # an interpreter without ctypes; the box's own isolation does not rest on it


def main():
    protect()
    if os.path.isdir(FILES):
        shutil.copytree(FILES, WORK, symlinks=True, dirs_exist_ok=True)
    os.chdir(WORK)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    Supervisor(connection).run()


if __name__ == "__main__":
    main()
