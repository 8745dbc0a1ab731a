"""Runs what is to be tested as a process that sees neither the tests nor the reward, and can write nowhere.

    python3 -I apart.py                           says whether that works here: exit code 0, or 1 and why not
    python3 -I apart.py [WRITABLE ...] -- COMMAND
    run(COMMAND) and evaluate(...)                from a test

A command is another user where the box has one, and held by Landlock where the kernel has that;
without either nothing runs. What it started and left is bound in the same way.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import subprocess
import sys

NOBODY = 65534
HIDDEN = {"tests", "logs", "solution", "proc", "sys"}
EXECUTE, WRITE, READ, LIST, TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Version of Landlock -> number of its rights over files; 16 since the fifth."""
CREATE, ADD, RESTRICT = 444, 445, 446
NO_NEW_PRIVS = 38
CPU_S, MEMORY = 5, 128 << 20
"""What one process of a command may take: a loop without end is not to take the box along."""

EVALUATE = """
import json, sys, warnings
sys.path.insert(0, sys.argv[1])
told, names = json.loads(sys.argv[2]), {}
exec(told["setup"], names)
found = []
for expression in told["expressions"]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = {"value": None, "raised": []}
        try:
            result["value"] = eval(expression, names)
        except Exception as error:
            result["raised"] = [kind.__name__ for kind in type(error).__mro__]
    result["warned"] = [[w.category.__name__, str(w.message)] for w in warned]
    found.append(result)
print()
print(json.dumps(found))
"""


def run(command, writable=(), timeout_s=30):
    """The finished command: `returncode`, `stdout`, `stderr`. Raises subprocess.TimeoutExpired."""
    launcher = [sys.executable, "-I", __file__, *map(str, writable), "--", *map(str, command)]
    process = subprocess.Popen(launcher, stdout=-1, stderr=-1, text=True, errors="replace", start_new_session=True)
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(launcher, process.returncode, out, err)


def evaluate(folder, setup, expressions):
    """{"value", "raised", "warned"} of each expression, after `setup`, with `folder` first on the path."""
    told = json.dumps({"setup": setup, "expressions": list(expressions)})
    done = run([sys.executable, "-I", "-c", EVALUATE, folder, told])
    found = json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else None
    assert isinstance(found, list) and len(found) == len(list(expressions)), done.stderr[-500:]
    return found


def become_nobody():
    """Whether this process is another user than the tests now."""
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    except OSError:
        return False
    return True


def landlock(writable):
    """Whether this process may write nowhere but in `writable` now, and read all but HIDDEN."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    version = call(CREATE, None, 0, 1)
    if version < 1:
        return False
    handled = (1 << RIGHTS.get(version, 16)) - 1
    scoped = 3 if version >= 6 else 0  # signals and sockets without a path
    about = struct.pack("QQQ", handled, 0, scoped)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    rules = call(CREATE, about, len(about), 0)
    if rules < 0:
        return False
    tops = {os.path.realpath(f"/{name}") for name in os.listdir("/")}
    allowed = {path: EXECUTE | READ | LIST for path in tops if path.split("/")[1] not in HIDDEN | {"dev", ""}}
    allowed.update({f"/dev/{name}": READ | WRITE | TRUNCATE for name in ("null", "zero", "random", "urandom")})
    allowed.update(dict.fromkeys(writable, handled))
    for path, rights in allowed.items():
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        if not os.path.isdir(path):
            rights &= EXECUTE | READ | WRITE | TRUNCATE
        call(ADD, rules, 1, struct.pack("=Qi", rights & handled, place), 0)
        os.close(place)
    return call(RESTRICT, rules, 0) == 0


if __name__ == "__main__":
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    if ctypes.CDLL(None).prctl(NO_NEW_PRIVS, 1, 0, 0, 0):  # or a set-user-ID program would undo it all
        sys.exit("what is tested cannot be kept from new privileges here")
    held = landlock(sys.argv[1:at])
    if not become_nobody() and not held:
        sys.exit("what is tested cannot be kept apart from its tests: neither another user nor Landlock here")
    if sys.argv[at + 1 :]:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.execvp(sys.argv[at + 1], sys.argv[at + 1 :])
