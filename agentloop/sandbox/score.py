"""The out-of-memory score of a sandbox's first process, which cannot open its own score in a read-only /proc.

The kernel kills the process with the highest score. The first process raises its own score while it starts a command,
so that the command inherits a high one, and lowers it again. The host opens the file and passes the descriptor.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

CREDENTIALS = struct.Struct("3i")
"""pid, uid, gid: struct ucred of the kernel."""


def hand_over(connection: socket.socket) -> None:
    """Sends the peer one byte with its own oom_score_adj, open for writing if this process may open it.

    Raises OSError if the connection is broken.
    """
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, _, _ = CREDENTIALS.unpack(data)
    fd = -1
    with suppress(OSError):  # the peer is in a process namespace that is not below ours, or another user's
        fd = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    try:
        socket.send_fds(connection, [b"\0"], [fd] if fd >= 0 else [])
    finally:
        if fd >= 0:
            os.close(fd)
