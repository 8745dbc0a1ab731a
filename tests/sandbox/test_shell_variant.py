"""Sandboxes whose image has no Python, so that a shell is their first process: the same laws, and what is its own."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from agentloop.errors import CapabilityError, ImageError, SandboxGone, SandboxUnavailable
from agentloop.protocols import SandboxBackend
from agentloop.sandbox import socket_folder
from agentloop.sandbox.bubblewrap import BubblewrapBackend
from agentloop.sandbox.channel import Channel
from agentloop.sandbox.fifo import Fifos
from agentloop.sandbox.supervised import SupervisedSandbox
from agentloop.testing import SANDBOX_LAWS, SandboxLaw, opened
from agentloop.types import SandboxSpec

from . import test_contained_processes, test_hostile, test_owner, test_streams, test_supervised
from .processes import children, comes_true, with_word
from .roots import busybox_root, python_root
from .shells import WithImage, with_program

pytestmark = pytest.mark.slow

SHELLS = ["ash", "dash", "bash"]
ROOM = 40
"""Processes of a sandbox that a bomb may fill."""


@pytest.fixture(scope="session")
def busybox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return busybox_root(tmp_path_factory.mktemp("busybox") / "root")


@pytest.fixture
def backend(request: pytest.FixtureRequest, busybox: Path) -> WithImage:
    return WithImage(request.getfixturevalue(getattr(request, "param", "bubblewrap")), busybox)


@pytest.fixture
def image(request: pytest.FixtureRequest, busybox: Path, tmp_path: Path) -> Path:
    """A root folder whose /bin/sh is the shell of that name."""
    if request.param == "ash":
        return busybox
    return with_program(request.param, "bin/sh", busybox, tmp_path / "root")


def run(
    backend: SandboxBackend,
    scene: Callable[[SupervisedSandbox], Coroutine[None, None, None]],
    spec: SandboxSpec | None = None,
) -> None:
    async def go() -> None:
        async with opened(backend, spec or SandboxSpec()) as sandbox:
            assert isinstance(sandbox, SupervisedSandbox)
            await asyncio.wait_for(scene(sandbox), 60)

    asyncio.run(go())


# ------------------------------------------------------------------- what holds for every sandbox

both = pytest.mark.parametrize("backend", ["bubblewrap", pytest.param("docker", marks=pytest.mark.slow)], indirect=True)


@both
@pytest.mark.parametrize("law", SANDBOX_LAWS, ids=lambda law: law.__name__)
def test_backend_keeps(law: SandboxLaw, backend: SandboxBackend, tmp_path: Path) -> None:
    asyncio.run(law(backend, tmp_path))


test_output_comes_while_the_command_runs = test_streams.test_output_comes_while_the_command_runs
test_more_than_any_window_goes_both_ways_at_once = test_streams.test_more_than_any_window_goes_both_ways_at_once
test_a_killed_process_ends_for_its_readers = test_streams.test_a_killed_process_ends_for_its_readers
test_a_signal_reaches_the_command = test_streams.test_a_signal_reaches_the_command
test_a_sandbox_that_closes_ends_what_is_read = test_streams.test_a_sandbox_that_closes_ends_what_is_read_and_written
test_a_session_runs_any_command_and_goes_on = test_streams.test_a_session_runs_any_command_and_goes_on
test_a_session_survives_a_timeout = test_streams.test_a_session_survives_a_timeout
test_a_session_begins_anew = test_streams.test_a_session_whose_shell_ends_says_so_and_begins_anew
test_a_flood_in_a_session_is_ended_and_counted = test_streams.test_a_flood_in_a_session_is_ended_and_counted
test_a_lease_takes_its_strays_along = test_supervised.test_a_lease_takes_its_strays_and_its_scratch_along_and_no_more
test_what_a_lease_leaves_harms_no_other = test_hostile.test_what_a_lease_leaves_harms_no_other
test_a_command_may_clean_up_first = test_hostile.test_a_command_whose_time_is_up_may_clean_up_first
test_files_that_do_not_fit_say_so = test_hostile.test_files_that_do_not_fit_say_so
test_unusual_files_are_copied = test_hostile.test_unusual_files_are_copied_and_can_be_added_to


@pytest.mark.parametrize(
    "test",
    [
        test_supervised.test_a_closed_lease_answers_what_still_waits,
        test_supervised.test_a_flood_costs_the_host_no_memory,
        test_hostile.test_a_cancelled_call_ends_its_command,
    ],
    ids=lambda test: test.__name__,
)
def test_it_passes(test: Callable[[SandboxBackend], None], backend: SandboxBackend) -> None:
    test(backend)


# ----------------------------------------------------------------------- what is its own


@both
def test_the_image_decides_who_is_first(backend: WithImage, tmp_path: Path) -> None:
    async def scene(sandbox: SupervisedSandbox) -> None:
        done = await sandbox.exec("command -v python3; cat /proc/1/cmdline")
        assert isinstance(sandbox._connection, Channel if "bin/python3\n" in done.stdout else Fifos)
        first.append(done.stdout.split("\0")[0].split("\n")[-1])

    first: list[str] = []
    run(backend, scene)
    run(backend, scene, SandboxSpec(image=str(python_root(tmp_path / "root"))))
    assert first == ["/bin/sh", "python3"]


@pytest.mark.parametrize("image", SHELLS, indirect=True)
def test_any_shell_will_do(bubblewrap: BubblewrapBackend, image: Path) -> None:
    odd = r"printf '[%s]' 'a\nb' \\ \	 '" + "\n'; cat <<E\n$((6 * 7)) \\c\nE\nprintf %s x\\ "

    async def scene(sandbox: SupervisedSandbox) -> None:
        done = await sandbox.exec(odd)
        assert done.stdout == "[a\\nb][\\][\t][\n]42 \\c\nx "
        assert (await sandbox.exec("exit 9")).exit_code == 9
        assert (await sandbox.exec("kill -15 $$")).exit_code == 143
        session = sandbox.session()
        await session.exec("cd /tmp; A=1")
        assert (await session.exec("sleep 60", timeout_s=0.3)).timed_out
        done = await session.exec("pwd; echo $A")
        assert (done.stdout, done.restarted) == ("/tmp\n1\n", False)
        await session.close()
        await sandbox.write("/tmp/a/b", b"data\0")
        assert await sandbox.read("/tmp/a/b") == b"data\0"

    run(WithImage(bubblewrap, image), scene)


@pytest.mark.parametrize("image", SHELLS, indirect=True)
def test_its_first_process_survives_what_a_command_does_to_it(bubblewrap: BubblewrapBackend, image: Path) -> None:
    async def scene(sandbox: SupervisedSandbox) -> None:
        for name in ("INT", "TERM", "HUP", "QUIT", "PIPE", "USR1", "ALRM", "KILL", "STOP", "TTIN", "CHLD"):
            await sandbox.exec(f"kill -{name} 1")
            assert (await sandbox.exec("echo alive")).stdout == "alive\n", name
        other = asyncio.ensure_future(sandbox.exec("sleep 60"))
        await asyncio.sleep(0.1)
        await sandbox.exec("kill -9 -1")
        assert (await asyncio.wait_for(other, 5)).exit_code == 137
        assert (await sandbox.exec("echo alive")).stdout == "alive\n"

    run(WithImage(bubblewrap, image), scene)


BREAKAGE = test_contained_processes.BREAKAGE | {
    "what every program is": "rm -f /bin/busybox || chmod 000 /bin/busybox",
    "what it runs itself": "for p in sleep rm cat kill mkfifo head sh env setsid; do ln -sf /bin/true /bin/$p; done",
    "its pipes": "rm -rf /run/agentloop/sockets/*; for f in /run/agentloop/sockets/*; do : > $f; cat $f & done",
}


@pytest.mark.first(backend=1, breakage=3)
@pytest.mark.first(root=1, breakage=3)
@pytest.mark.first(backend=1, root=1)
@both
@pytest.mark.parametrize("breakage", BREAKAGE.values(), ids=BREAKAGE)
@pytest.mark.parametrize("root", [False, True], ids=["user", "root"])
def test_a_broken_sandbox_works_or_is_gone_and_never_lies(backend: WithImage, breakage: str, root: bool) -> None:
    test_contained_processes.test_a_broken_sandbox_works_or_is_gone_and_never_lies(
        backend, breakage, SandboxSpec(root=root)
    )


@both
def test_orders_that_a_command_takes_away_are_no_results(backend: WithImage) -> None:
    """A shell cannot keep its descriptors to itself (README): what it is then not told to do does not seem done."""

    async def scene(sandbox: SupervisedSandbox) -> None:
        await sandbox.exec("for f in /proc/1/fd/*; do head -c 1 $f > /dev/null 2>&1 & done")
        for _ in range(3):
            try:
                done = await sandbox.exec("echo true; exit 3", timeout_s=1.0)
            except SandboxGone:
                return
            assert (done.exit_code, done.stdout) == (3, "true\n") or (done.timed_out and not done.stdout), done

    run(backend, scene)


def test_a_command_can_be_interrupted_where_env_sees_to_it(
    bubblewrap: BubblewrapBackend, busybox: Path, tmp_path: Path
) -> None:
    async def scene(sandbox: SupervisedSandbox) -> None:
        process = sandbox.start("trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.05; done")
        assert await process.stdout.read() == b"ready\n"
        process.signal(signal.SIGINT)
        assert await asyncio.wait_for(process.stdout.read(), 5) == b"caught\n"
        assert (await process.wait()).exit_code == 9

    dash = with_program("dash", "bin/sh", busybox, tmp_path / "dash")  # busybox's shell asks no other env
    run(WithImage(bubblewrap, with_program("env", "bin/env", dash, tmp_path / "root")), scene)


BOMBS = {
    "tree": "f() { f | f & }; f; sleep 60",
    "sessions": "echo 'while :; do setsid sh /tmp/bomb & done' > /tmp/bomb; sh /tmp/bomb & sleep 60",
    "full": f"i=0; while [ $i -lt {ROOM} ]; do env -i setsid sleep 60 & i=$((i+1)); done; sleep 60",
}


@pytest.mark.first(image=1, bomb=1)
@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
@pytest.mark.parametrize("image", SHELLS[:2], indirect=True)
def test_a_bomb_ends_with_its_command(bubblewrap: BubblewrapBackend, image: Path, bomb: str) -> None:
    async def scene(sandbox: SupervisedSandbox) -> None:
        for _ in range(3):  # what clears a full sandbox must be there again
            await sandbox.exec(bomb, timeout_s=0.7)
            sandbox.discard("sandbox")  # for a bomb that ended by itself
            started = time.monotonic()
            done = await sandbox.exec("echo alive; ls -d /proc/[0-9]* | wc -l")
            assert (done.stdout.split()[:1], done.exit_code) == (["alive"], 0), done
            assert int(done.stdout.split()[1]) < 10
            assert time.monotonic() - started < 5.0

    run(WithImage(bubblewrap, image), scene, SandboxSpec(n_processes=ROOM))


def test_a_full_sandbox_says_so_and_harms_nobody(backend: SandboxBackend) -> None:
    fill = f"i=0; while [ $i -lt {ROOM} ]; do sleep 7655.5 & i=$((i+1)); done; sleep 60"

    async def scene(sandbox: SupervisedSandbox) -> None:
        filling = asyncio.ensure_future(sandbox.exec(f"({fill}) 2>&1 & sleep 60", timeout_s=2.0))
        await asyncio.sleep(0.5)
        n = len(with_word("7655.5"))
        for _ in range(3):
            done = await sandbox.exec("ls /")
            assert (done.exit_code in (2, 126), "fork" in done.stderr or "no room" in done.stderr) == (True, True)
        assert len(with_word("7655.5")) == n > ROOM / 2, "another command's processes were ended"
        assert (await filling).timed_out
        assert (await sandbox.exec("echo alive")).stdout == "alive\n"

    run(backend, scene, SandboxSpec(n_processes=ROOM))
    assert not with_word("7655.5")


@pytest.mark.first(n_processes=2)
@pytest.mark.first(backend=1, n_processes=1)
@both
@pytest.mark.parametrize("n_processes", [24, 25, 26, 27])
def test_a_command_that_finds_no_room_never_seems_to_have_worked(backend: WithImage, n_processes: int) -> None:
    """Whatever number of processes is left: one for its shell is not enough."""

    async def scene(sandbox: SupervisedSandbox) -> None:
        running = [sandbox.start("sleep 60") for _ in range(n_processes)]
        await asyncio.sleep(1.0)
        for _ in range(3):
            done = await sandbox.exec("echo it ran; exit 5", timeout_s=5.0)
            assert (done.exit_code, done.stdout) in ((5, "it ran\n"), (126, "")), done
        for process in running:
            process.kill()

    run(backend, scene, SandboxSpec(n_processes=n_processes))


ORDER = "run ../../../tmp/q/x - 9 0 0 while sleep 0.1; do echo more > /tmp/more; done"
"""For the first process, with files of the command's own instead of the host's pipes."""


@both
def test_orders_of_a_command_end_with_it(backend: WithImage) -> None:
    # Many that mean nothing before it: so there is a line, and what comes behind the host's own order is taken later.
    order = f"mkdir /tmp/q; cd /tmp/q; : > x.end; : > x.out; : > x.err; (seq 4000; echo '{ORDER}') > order"
    insist = "while :; do cat /tmp/q/order > /proc/1/fd/3; done"

    async def scene(sandbox: SupervisedSandbox) -> None:
        await sandbox.exec(f"{order}; ( {insist} ) > /dev/null 2>&1 &")
        await asyncio.sleep(0.5)
        for _ in range(2):
            sandbox.kill_all()
            try:
                done = await sandbox.exec("rm -f /tmp/more; sleep 0.4; cat /tmp/more; ls -d /proc/[0-9]* | wc -l")
            except SandboxGone:
                return
            assert done.stdout.strip().isdecimal(), done
            assert int(done.stdout) < 8

    run(backend, scene)


@pytest.mark.first(backend=1, root=1)
@both
@pytest.mark.parametrize("root", [False, True], ids=["user", "root"])
def test_no_command_writes_to_its_memory(backend: WithImage, root: bool) -> None:
    async def scene(sandbox: SupervisedSandbox) -> None:
        for path in ("/proc/1/mem", "/proc/1/task/1/mem"):
            assert (await sandbox.exec(f"exec 3<> {path}")).exit_code != 0
        assert (await sandbox.exec("exec 3<> /dev/null")).exit_code == 0

    run(backend, scene, SandboxSpec(root=root))


@both
def test_a_session_ends_though_who_tells_it_is_stopped(backend: WithImage) -> None:
    stop = "for p in /proc/[0-9]*; do p=${p#/proc/}; [ $p = $$ ] || kill -STOP $p; done"

    async def scene(sandbox: SupervisedSandbox) -> None:
        session = sandbox.session()
        await session.exec("x=1")
        await sandbox.exec(stop, timeout_s=1.0)
        done = await asyncio.wait_for(session.exec("echo $x", timeout_s=1.0), 5)
        assert (done.timed_out, done.restarted) == (True, True)
        assert (await session.exec("echo ${x-new}")).stdout == "new\n"
        await session.close()

    run(backend, scene)


def test_daemons_end_with_a_command_whose_time_is_up_and_no_others(backend: SandboxBackend) -> None:
    async def scene(sandbox: SupervisedSandbox) -> None:
        await sandbox.exec("setsid sleep 7651.5 > /dev/null 2>&1 &")
        await sandbox.exec("(setsid sleep 7652.5 &); env -i setsid sleep 7653.5 & sleep 60", timeout_s=0.3)
        assert comes_true(lambda: not with_word("7652.5") and not with_word("7653.5"))
        assert with_word("7651.5"), "a marked process of another command was ended"

    run(backend, scene)
    assert comes_true(lambda: not with_word("7651.5"))


def test_an_end_cannot_be_forged_by_what_is_printed_or_inherited(backend: SandboxBackend) -> None:
    async def scene(sandbox: SupervisedSandbox) -> None:
        done = await sandbox.exec(
            "echo 0; echo 0 126; for n in 3 4 5 6 7 8 9; do echo 0 >&$n; done 2>/dev/null; exit 5"
        )
        assert (done.exit_code, done.stdout) == (5, "0\n0 126\n")
        assert (await sandbox.exec("exec 0<&- 1>&- 2>&-; exit 6")).exit_code == 6
        # The host removes a command's pipes when both ends are open, which may be after the command has begun.
        gone = 'until [ -z "$(ls /run/agentloop/sockets)" ]; do sleep 0.01; done'
        waiting = asyncio.ensure_future(sandbox.exec("sleep 3; exit 7"))
        assert not (await sandbox.exec(gone, timeout_s=10.0)).timed_out
        await sandbox.exec(
            "echo x > /run/agentloop/sockets/orders; for f in /run/agentloop/sockets/*; do echo 0 > $f; done"
        )
        assert (await waiting).exit_code == 7

    run(backend, scene)


def test_no_pipe_and_no_descriptor_is_left(backend: SandboxBackend) -> None:
    async def scene(sandbox: SupervisedSandbox) -> None:
        connection = sandbox._connection
        assert isinstance(connection, Fifos)
        await sandbox.exec("true")
        n = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            await sandbox.exec("yes", max_output=100)
            for timeout_s in (0.0, 0.1):
                await sandbox.exec("sleep 60", timeout_s=timeout_s)
            process = sandbox.start("echo unread; exit 3")
            assert (await process.wait()).exit_code == 3
            process.kill()
            process = sandbox.start("cat")
            process.kill()
            assert (await process.wait()).exit_code == 137
            session = sandbox.session()
            await session.exec("true")
            await session.close()
            call = asyncio.ensure_future(sandbox.exec("sleep 60"))
            await asyncio.sleep(0.05)
            call.cancel()
        await asyncio.sleep(0.3)
        assert len(os.listdir("/proc/self/fd")) == n
        assert list(connection._sockets.iterdir()) == []
        assert not connection._running

    run(backend, scene)


def test_what_nobody_reads_is_not_lost_when_the_command_ends(backend: SandboxBackend) -> None:
    async def scene(sandbox: SupervisedSandbox) -> None:
        process = sandbox.start("head -c 320000 /dev/zero; (sleep 60 &)")  # more than a window, less than it and a pipe
        assert (await asyncio.wait_for(process.wait(), 5)).exit_code == 0
        assert sum([len(piece) async for piece in process.stdout]) == 320_000

    run(backend, scene)


def test_input_that_nobody_reads_holds_up_nobody(backend: SandboxBackend) -> None:
    async def scene(sandbox: SupervisedSandbox) -> None:
        for command in ("exit 0", "exec 0<&-; sleep 60", "head -c 10 > /dev/null; sleep 60 < /dev/null"):
            process = sandbox.start(command)
            await asyncio.wait_for(process.stdin.write(b"x" * 1_000_000), 5)
            process.kill()

    run(backend, scene)


def test_a_call_that_is_cancelled_at_once_leaves_nothing(backend: SandboxBackend) -> None:
    async def scene(sandbox: SupervisedSandbox) -> None:
        for delay_s in (0.0, 0.001, 0.002, 0.004):
            call = asyncio.ensure_future(sandbox.exec("sleep 7656.5"))
            await asyncio.sleep(delay_s)
            call.cancel()
        await asyncio.sleep(0.5)
        assert with_word("7656.5") == []

    run(backend, scene)


def test_its_lifetime_is_held(backend: SandboxBackend) -> None:
    async def scene(sandbox: SupervisedSandbox) -> None:
        with pytest.raises(SandboxGone, match="lifetime"):
            await sandbox.exec("sleep 7657.5")
        assert comes_true(lambda: not with_word("7657.5"))

    run(backend, scene, SandboxSpec(lifetime_s=0.5))


@both
def test_what_needs_python_is_refused_and_leaves_nothing(backend: SandboxBackend) -> None:
    run(backend, _nothing)  # after the first sandbox there may be a shell that waits for our own end
    before = set(children(os.getpid()))

    async def scene(sandbox: SupervisedSandbox) -> None:
        with pytest.raises(CapabilityError, match="a terminal needs python3 in the image"):
            sandbox.terminal("true")
        with pytest.raises(CapabilityError, match="allowed_hosts or to a gateway needs python3 in the image"):
            sandbox.set_network(("example.org",))

    run(backend, scene)
    with pytest.raises(CapabilityError, match="allowed_hosts or to a gateway needs python3"):
        asyncio.run(backend.create(SandboxSpec(allowed_hosts=("example.org",))))
    assert list(socket_folder.PARENT.glob(f"agentloop-{os.getpid()}-*")) == []
    assert comes_true(
        lambda: not [pid for pid in set(children(os.getpid())) - before if Path(f"/proc/{pid}/exe").exists()]
    )


async def _nothing(sandbox: SupervisedSandbox) -> None:
    """A sandbox that is not used."""


def test_what_cannot_be_a_sandbox_says_why(backend: SandboxBackend, tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="cannot start in /no/where"):
        asyncio.run(backend.create(SandboxSpec(workdir="/no/where")))
    with pytest.raises(ImageError, match=f"'{tmp_path}' does not start: it has no shell at /bin/sh"):
        asyncio.run(backend.create(SandboxSpec(image=str(tmp_path))))


def test_the_image_is_not_changed_and_root_may_write(bubblewrap: BubblewrapBackend, busybox: Path) -> None:
    spec = SandboxSpec(image=str(busybox), root=True)

    async def scene(sandbox: SupervisedSandbox) -> None:
        assert (await sandbox.exec("id -u; echo x > /etc/new && rm /bin/vi && cat /etc/new")).stdout == "0\nx\n"
        assert (await sandbox.exec("echo x > /run/agentloop/inside/pid1.sh")).exit_code != 0

    before = sorted(path.relative_to(busybox) for path in busybox.rglob("*"))
    for _ in range(2):
        run(bubblewrap, scene, spec)
    assert sorted(path.relative_to(busybox) for path in busybox.rglob("*")) == before


@pytest.mark.alone
def test_a_sandbox_goes_with_its_owner(bubblewrap: BubblewrapBackend, busybox: Path) -> None:
    mark = f"79{os.getpid()}.5"
    with test_owner.owner(bubblewrap.name, mark, image=str(busybox)) as (process, _):
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert comes_true(lambda: not with_word(mark)), "the sandbox outlived its owner"
    socket_folder.sweep_socket_folders()  # of the owner, which could not do it
