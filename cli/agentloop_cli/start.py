"""Entry point of the command: Ctrl-C ends it from its first moment."""

from __future__ import annotations

import atexit
import gc
import signal
import sys
import threading

PAUSE_S = 0.05
"""Until Python has left the code that dropped the interrupt."""
COLLECT_EVERY = 10_000
"""Number of new objects after which the garbage collector looks for garbage. Python's 700 suit small programs."""


def run() -> None:
    """`main.main`, whose import takes a second. Ctrl-C then ends the process at once, because nothing has begun."""
    gc.set_threshold(COLLECT_EVERY)
    atexit.register(gc.freeze)  # Python's last collection would take a fifth of a second, and frees nothing of use
    sys.unraisablehook = interrupt_again
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from agentloop_cli.main import main

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


def interrupt_again(dropped: sys.UnraisableHookArgs) -> None:
    """Interrupt the command again where Python has dropped a KeyboardInterrupt, as it does in every finaliser.

    Each import runs one. Without this the command goes on in spite of Ctrl-C.
    """
    if not issubclass(dropped.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)
        return
    timer = threading.Timer(PAUSE_S, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.daemon = True
    timer.start()
