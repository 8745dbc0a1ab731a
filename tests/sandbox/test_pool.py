"""Laws of the pool, over a backend that counts; and once over a real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from agentloop.errors import SandboxGone, SandboxUnavailable
from agentloop.protocols import Sandbox, SandboxBackend
from agentloop.sandbox import pool as pool_module
from agentloop.sandbox.pool import SandboxPool
from agentloop.types import ExecResult, SandboxSpec

READS, WRITES = SandboxSpec(read_only=True), SandboxSpec()


class CountedBox:
    """Answers with the lease's name; dies when told to."""

    isolation = "none"

    def __init__(self, box_id: str) -> None:
        self.id, self.gone, self.is_closed, self.discarded = box_id, False, False, list[str]()

    async def exec(
        self, command: str, *, timeout_s: float = 30.0, max_output: int = 16_384, lease: str = "box"
    ) -> ExecResult:
        if self.gone:
            raise SandboxGone("the sandbox is gone")
        return ExecResult(exit_code=0, stdout=lease, stderr="")

    def discard(self, lease: str) -> None:
        self.discarded.append(lease)

    async def close(self) -> None:
        self.gone = self.is_closed = True


class PlainBox:
    """What the Protocol asks of a sandbox and no more: it cannot be shared."""

    isolation = "none"

    def __init__(self, box_id: str) -> None:
        self.id, self.is_closed = box_id, False

    async def exec(self, command: str, *, timeout_s: float = 30.0, max_output: int = 16_384) -> ExecResult:
        return ExecResult(exit_code=0, stdout=self.id, stderr="")

    async def close(self) -> None:
        self.is_closed = True


class CountedBackend:
    """Makes boxes in 10 ms and remembers them; a stand-in because starts must be slowed and broken on purpose."""

    name, isolation = "counted", "none"

    def __init__(self, make: Callable[[str], Sandbox] = CountedBox, failures: int = 0, delay_s: float = 0.01) -> None:
        self.make, self.failures, self.delay_s = make, failures, delay_s
        self.boxes: list[Sandbox] = []
        self.n_cancelled = 0

    def probe(self) -> str | None:
        return None

    async def create(self, spec: SandboxSpec) -> Sandbox:
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.n_cancelled += 1
            raise
        if self.failures:
            self.failures -= 1
            raise SandboxUnavailable("not this time")
        self.boxes.append(self.make(f"box-{len(self.boxes)}"))
        return self.boxes[-1]


@asynccontextmanager
async def a_pool(backend: SandboxBackend, min_idle: int = 0) -> AsyncIterator[SandboxPool]:
    pool = SandboxPool(backend, min_idle=min_idle)
    try:
        yield pool
    finally:
        await pool.close()


def n_open(backend: CountedBackend) -> int:
    return sum(not box.gone for box in backend.boxes if isinstance(box, CountedBox))


async def use(pool: SandboxPool, spec: SandboxSpec, lease_id: str, hold_s: float = 0.0) -> str:
    async with pool.lease(spec, lease_id) as box:
        done = await box.exec("true")
        await asyncio.sleep(hold_s)
        return done.stdout


def test_episodes_that_only_read_share_one_box() -> None:
    async def scene() -> None:
        backend = CountedBackend()
        async with a_pool(backend) as pool:
            names = [f"lease-{n}" for n in range(200)]
            assert await asyncio.gather(*(use(pool, READS, name) for name in names)) == names
            assert len(backend.boxes) == 1
            assert isinstance(backend.boxes[0], CountedBox)
            assert sorted(backend.boxes[0].discarded) == sorted(names)
            await use(pool, SandboxSpec(read_only=True, scratch_mb=1), "another spec")
            assert len(backend.boxes) == 2
        assert n_open(backend) == 0

    asyncio.run(scene())


@pytest.mark.slow
def test_200_episodes_share_one_real_box(bubblewrap: SandboxBackend) -> None:
    async def scene() -> set[str]:
        async with a_pool(bubblewrap) as pool:

            async def one(n: int) -> str:
                async with pool.lease(READS, f"lease-{n}") as box:
                    await box.exec('echo x >> "$HOME/note"')
                    assert (await box.exec('cat "$HOME/note"; basename "$HOME"')).stdout == f"x\nlease-{n}\n"
                    return box.id.split("/")[0]

            return set(await asyncio.gather(*(one(n) for n in range(200))))

    assert len(asyncio.run(scene())) == 1


def test_a_dead_shared_box_is_replaced_once_and_closed() -> None:
    async def scene() -> None:
        backend = CountedBackend()
        async with a_pool(backend) as pool:
            async with pool.lease(READS, "unlucky") as box:
                assert isinstance(backend.boxes[0], CountedBox)
                backend.boxes[0].gone = True
                await asyncio.gather(*(use(pool, READS, f"next-{n}") for n in range(50)))
                with pytest.raises(SandboxGone):
                    await box.exec("true")
            assert len(backend.boxes) == 2
            assert n_open(backend) == 1
            assert backend.boxes[0].is_closed, "what the dead box had on the host was not removed"

    asyncio.run(scene())


def test_a_start_that_failed_is_tried_again_by_the_next_lease() -> None:
    async def scene() -> None:
        backend = CountedBackend(failures=1)
        async with a_pool(backend) as pool:
            first = await asyncio.gather(*(use(pool, READS, f"{n}") for n in range(5)), return_exceptions=True)
            assert [type(error) for error in first] == [SandboxUnavailable] * 5
            assert await use(pool, READS, "later") == "later"

    asyncio.run(scene())


def test_a_waiter_that_gives_up_does_not_take_the_box_from_the_others() -> None:
    async def scene() -> None:
        backend = CountedBackend(delay_s=0.05)
        async with a_pool(backend) as pool:
            users = [asyncio.ensure_future(use(pool, READS, f"{n}")) for n in range(3)]
            await asyncio.sleep(0.01)
            users[0].cancel()
            assert await asyncio.gather(*users[1:]) == ["1", "2"]
            assert len(backend.boxes) == 1

    asyncio.run(scene())


def test_episodes_that_write_have_boxes_of_their_own_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_BOXES", 3)

    async def scene() -> None:
        backend = CountedBackend()
        most = 0

        async def one(pool: SandboxPool, n: int) -> None:
            nonlocal most
            async with pool.lease(WRITES, f"{n}"):
                most = max(most, n_open(backend))
                await asyncio.sleep(0.01)

        async with a_pool(backend) as pool:
            await asyncio.gather(*(one(pool, n) for n in range(12)))
            assert len(backend.boxes) == 12
            assert most == 3
            assert n_open(backend) == 0

    asyncio.run(scene())


def test_close_ends_boxes_in_use_and_boxes_that_are_being_created() -> None:
    async def scene() -> None:
        backend = CountedBackend()
        pool = SandboxPool(backend, min_idle=0)
        using = [asyncio.ensure_future(use(pool, spec, "in use", hold_s=0.2)) for spec in (READS, WRITES)]
        await asyncio.sleep(0.05)
        assert n_open(backend) == 2
        backend.delay_s = 60.0
        specs = [WRITES, SandboxSpec(read_only=True, scratch_mb=1)]
        waiting = [asyncio.ensure_future(use(pool, spec, "waits")) for spec in specs]
        await asyncio.sleep(0.05)
        await asyncio.wait_for(pool.close(), 1.0)
        assert n_open(backend) == 0
        assert backend.n_cancelled == 2
        ends = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 1.0)
        assert [type(error) for error in ends] == [SandboxGone, SandboxGone]
        with pytest.raises(SandboxGone, match="pool is closed"):
            await use(pool, WRITES, "too late")
        await asyncio.gather(*using)

    asyncio.run(scene())


def test_a_cancelled_lease_leaves_no_box() -> None:
    async def scene() -> None:
        for delay_s in (0.0, 0.005, 0.0101, 0.02):
            backend = CountedBackend()
            pool = SandboxPool(backend, min_idle=0)
            user = asyncio.ensure_future(use(pool, WRITES, "x", hold_s=60.0))
            await asyncio.sleep(delay_s)
            user.cancel()
            with pytest.raises(asyncio.CancelledError):
                await user
            assert n_open(backend) == 0

    asyncio.run(scene())


def test_boxes_that_cannot_be_shared_are_not() -> None:
    async def scene() -> None:
        backend = CountedBackend(make=PlainBox)
        async with a_pool(backend) as pool:
            names = await asyncio.gather(*(use(pool, READS, f"{n}", hold_s=0.01) for n in range(4)))
            assert len(set(names)) == 4
        assert all(isinstance(box, PlainBox) and box.is_closed for box in backend.boxes)

    asyncio.run(scene())
