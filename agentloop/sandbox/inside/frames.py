"""The frames between a sandbox and its host, as both ends read them.

A frame is HEADER (id, kind, length of the payload; big-endian) and the payload. Ids are chosen by
who opens: the host for commands, the sandbox (FROM_BOX and above) for connections to the outside.

    READY    sandbox    nothing, or why the sandbox cannot be used
    START    host   REQUEST, the lease's name, the command
    DONE     sandbox    RESULT, what was kept of stdout and of stderr
    DATA     both   a channel, then bytes; without bytes, the end of that channel
    CREDIT   both   GRANT: that many more bytes may be sent on the channel; 0 says that nobody takes any more
    SIGNAL   host   BYTE: a signal for the group; FOREGROUND ends what a session's latest order started
    RESIZE   host   SIZE: rows and columns of a terminal
    DISCARD  host   id 0: a lease, or nothing for every lease; else give up that command
    LISTEN   host   open the way to the outside, where the proxy answers
    OPEN     sandbox    a connection to the proxy
"""

import struct

HEADER = struct.Struct(">IBI")
REQUEST = struct.Struct(">IIBHHH")  # timeout ms, bytes kept of each stream, how, rows, columns, length of the lease
RESULT = struct.Struct(">iBIII")  # exit code, timed out, bytes dropped, duration us, length of stdout
BYTE = struct.Struct(">B")
GRANT = struct.Struct(">BI")  # channel, bytes
SIZE = struct.Struct(">HH")

READY, START, DONE, DATA, CREDIT, SIGNAL, RESIZE, DISCARD, LISTEN, OPEN = range(10)

# How a command runs: with channels instead of kept output; in a terminal; as a session's shell.
STREAM = 1
TERMINAL = 2
CONTROL = 4
STDIN, STDOUT, STDERR, ORDERS, RECORDS = range(5)
"""Channels. ORDERS and RECORDS are a session's: what its shell is to run, and how that ended."""
FOREGROUND = 0
NO_TIMEOUT = 0xFFFFFFFF
FROM_SANDBOX = 1 << 31

WINDOW = 1 << 18
"""Bytes that may be under way in one channel before the receiver asks for more."""
CHUNK = 1 << 16

PROXY_PORT = 3128
"""Where the sandbox finds the proxy, on its own loopback."""
MARK = "AGENTLOOP_COMMAND"
"""Variable that says which lease and which command a process belongs to."""
