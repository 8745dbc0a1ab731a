"""Prepares PID 1 before the first command: protects it from commands, and fills the working directory."""

import posix as os

from .commands import PATH, spawn

FILES = "/run/agentloop/files"
WORK = "/work"
PR_SET_DUMPABLE = 4


def protect() -> None:
    """Keeps commands, which run as the same user, out of this process's memory.

    It uses the C module alone, because importing `ctypes` would take a third of a sandbox's start.
    """
    try:
        import _ctypes

        here = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]  # None is the program itself
        prctl = _ctypes.dlsym(here, "prctl")
        _ctypes.call_function(prctl, (PR_SET_DUMPABLE, 0, 0, 0, 0))
    except (ImportError, OSError, AttributeError):
        pass  # an interpreter without ctypes; the isolation of the sandbox does not depend on it


def keep_crashes() -> None:
    """Prevents crashes in the sandbox from starting the machine's core dump handler, which runs outside and as root."""
    try:
        import resource

        # One byte, not none: the kernel heeds a handler's limit at this value alone.
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    except (ImportError, ValueError, OSError):
        pass  # a limit that is lower already; a minimal interpreter


def fill_work() -> None:
    """Copies the files, if there are any, to the writable /work. Raises OSError with the message of `cp`."""
    if not os.access(FILES, os.F_OK):
        return
    read, write = os.pipe2(os.O_CLOEXEC)
    text = f"cp -RPp {FILES}/. {WORK} && chmod u+rwx {WORK}"
    pid = spawn(text.encode(), {"PATH": PATH}, {2: write}, None)
    os.close(write)
    with open(read, "rb") as messages:
        words = messages.read().decode(errors="replace").splitlines()
    if os.waitpid(pid, 0)[1]:
        raise OSError("cannot fill {}: {}".format(WORK, words[0] if words else "cp failed"))
