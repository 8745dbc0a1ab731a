"""Moves bytes between commands and the connection, as far as each side has room for them.

A command's output is read only while its receiver has granted room. The host gets new room for its input as the command
accepts it. So a slow end slows down its own channel and no other.
"""

import _socket as socket
import fcntl
import posix as os
import select
import sys
import termios

from .commands import BoundedOutput, RunningCommand, Sent
from .frames import CHUNK, CREDIT, FROM_SANDBOX, GRANT, RECORDS, STDERR, STDIN, STDOUT, STREAM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class InputQueue:
    """The host's bytes that wait to be written into a channel."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.waiting = bytearray()
        self.ended = False


class Flow:
    """Every open channel of the sandbox."""

    def __init__(self, poll: "select.poll", send: "Callable[[int, int, bytes], None]") -> None:
        self.poll = poll
        self.send = send
        self.sources = {}  # type: dict[tuple[int, int], Sent | BoundedOutput]
        self.sinks = {}  # type: dict[tuple[int, int], InputQueue]
        self.keys = {}  # type: dict[int, tuple[int, int]]
        self.over = set()  # type: set[int]
        self.commands = {}  # type: dict[int, RunningCommand]

    def watch(self, command: RunningCommand) -> None:
        """Opens the channels of a command that was started."""
        self.commands[command.ident] = command
        for channel, source in command.sources.items():
            self.sources[command.ident, channel] = source
            self.resume(command.ident, channel)
        for channel, fd in command.sinks.items():
            self.sinks[command.ident, channel] = InputQueue(fd)

    @property
    def n_connections(self) -> int:
        """Number of connections from the sandbox that the host has not closed."""
        return sum(ident >= FROM_SANDBOX for ident in {ident for ident, _ in [*self.sources, *self.sinks]})

    def connect(self, ident: int, fd: int, other: int) -> None:
        """Opens the two channels of a connection from the sandbox. other: a second descriptor of it."""
        os.set_blocking(fd, False)
        self.sinks[ident, STDIN] = InputQueue(other)
        self.sources[ident, STDOUT] = Sent(fd, ident, STDOUT, self.send)
        self.resume(ident, STDOUT)

    def ready(self, fd: int) -> None:
        """Called when a file descriptor can be read or written."""
        key = self.keys.get(fd)
        if key is None:
            return
        if key in self.sources and self.sources[key].fd == fd:
            self.read(*key)
        else:
            self.push(key)

    # ---------------------------------------------------------------- out of the sandbox

    def resume(self, ident: int, channel: int) -> None:
        fd = self.sources[ident, channel].fd
        if fd not in self.keys:
            self.keys[fd] = (ident, channel)
            self.poll.register(fd, select.POLLIN)

    def pause(self, fd: int) -> None:
        if self.keys.pop(fd, None):
            self.poll.unregister(fd)

    def read(self, ident: int, channel: int) -> bool:
        """Reads a piece from a channel. False if nothing more can be read for now."""
        source = self.sources.get((ident, channel))
        if source is None:
            return False
        if not source.left:
            self.close(ident, channel)
            return False
        if channel == RECORDS and not self.printed(ident):
            self.pause(source.fd)  # until there is room for what was printed before
            return False
        if source.room <= 0:
            self.pause(source.fd)
            return False
        try:
            data = os.read(source.fd, min(CHUNK, source.room, source.left))
        except BlockingIOError:
            if ident in self.over:
                self.close(ident, channel)
            return False
        except OSError:  # how a terminal ends
            data = b""
        if not data:
            self.close(ident, channel)
            return False
        source.take(data)
        source.left -= len(data)
        if not source.left:
            self.close(ident, channel)
        if isinstance(source, BoundedOutput) and source.total > source.cap:
            command = self.commands.get(ident)
            if command:
                command.flooded = True
                command.kill()
        return True

    def printed(self, ident: int) -> bool:
        """True if everything printed so far has been forwarded."""
        for channel in (STDOUT, STDERR):
            while self.read(ident, channel):
                pass
            source = self.sources.get((ident, channel))
            if source is not None and source.room <= 0:
                return False
        return True

    def grant(self, ident: int, channel: int, n: int) -> None:
        """Called when the receiver has room for more."""
        source = self.sources.get((ident, channel))
        if isinstance(source, Sent):
            source.room += n
            for other in (STDOUT, STDERR, RECORDS):
                if (ident, other) in self.sources:
                    self.resume(ident, other)

    def close(self, ident: int, channel: int) -> None:
        source = self.sources.pop((ident, channel), None)
        if source is not None:
            self.pause(source.fd)
            os.close(source.fd)
            source.end()
            self.forget(ident)

    def finish(self, command: RunningCommand) -> "tuple[tuple[bytes, int], tuple[bytes, int]]":
        """Ends the channels of a command that ended. Returns (bytes, number dropped) of stdout and stderr, both empty
        if they were forwarded.

        Later output of a surviving child is dropped.
        """
        ident = command.ident
        self.over.add(ident)
        self.commands.pop(ident, None)
        for channel, source in command.sources.items():
            if command.terminal < 0 and (ident, channel) in self.sources:
                source.left = n_waiting(source.fd)
            while self.read(ident, channel):
                pass
            if not command.how & STREAM:
                self.close(ident, channel)
        for channel in command.sinks:
            self.shut((ident, channel))
        self.forget(ident)
        outputs = [source.contents() for source in command.sources.values() if isinstance(source, BoundedOutput)]
        return (outputs[0], outputs[1]) if outputs else ((b"", 0), (b"", 0))

    def forget(self, ident: int) -> None:
        if not any(key[0] == ident for key in self.sources):
            self.over.discard(ident)

    def drop(self, ident: int) -> None:
        """Closes everything that belongs to an id."""
        for key in [key for key in self.sources if key[0] == ident]:
            self.close(*key)
        for key in [key for key in self.sinks if key[0] == ident]:
            self.shut(key)

    # ---------------------------------------------------------------- into the sandbox

    def write(self, ident: int, channel: int, data: bytes) -> None:
        """Takes bytes for a channel; no bytes mark its end."""
        sink = self.sinks.get((ident, channel))
        if sink is None:
            self.send(ident, CREDIT, GRANT.pack(channel, 0))
            return
        sink.waiting += data
        sink.ended = sink.ended or not data
        self.push((ident, channel))

    def push(self, key: "tuple[int, int]") -> None:
        sink = self.sinks[key]
        try:
            n = os.write(sink.fd, sink.waiting) if sink.waiting else 0
        except BlockingIOError:
            n = 0
        except OSError:  # nobody reads it any more
            self.send(key[0], CREDIT, GRANT.pack(key[1], 0))
            self.shut(key)
            return
        del sink.waiting[:n]
        if n:
            self.send(key[0], CREDIT, GRANT.pack(key[1], n))
        if not sink.waiting and sink.ended:
            self.shut(key)
        elif sink.waiting and sink.fd not in self.keys:
            self.keys[sink.fd] = key
            self.poll.register(sink.fd, select.POLLOUT)
        elif not sink.waiting:
            self.pause(sink.fd)

    def shut(self, key: "tuple[int, int]") -> None:
        sink = self.sinks.pop(key, None)
        if sink is not None:
            self.pause(sink.fd)
            if key[0] >= FROM_SANDBOX:
                half_close(sink.fd)
            os.close(sink.fd)


def n_waiting(fd: int) -> int:
    """Number of bytes that can be read from a pipe now."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


def half_close(fd: int) -> None:
    """Ends one direction of a connection whose other direction stays open."""
    connection = socket.socket(fileno=fd)
    try:
        connection.shutdown(socket.SHUT_WR)
    except OSError:  # the peer left already
        pass
    connection.detach()
