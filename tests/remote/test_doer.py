"""A worker keeps sandboxes for the next unit of their stage, and not for longer than that takes."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentloop.loop.project import Project
from agentloop.objects.objects import Objects
from agentloop.remote import doer as module
from agentloop.remote.doer import RemoteDoer
from agentloop.sandbox.pool import SandboxPool

from .test_site import asked, claimed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("bubblewrap")]
IDLE_S = 1.5


def pools(doer: RemoteDoer) -> list[SandboxPool]:
    """Those that have sandboxes."""
    found = [pool for site in doer._sites.values() for _, pool in site._doers.values()]
    return [pool for pool in found if pool._sandboxes]


def test_sandboxes_stay_for_the_next_unit_and_end_without_one(
    project: Project, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_S", IDLE_S)
    one = claimed(project, objects, asked(project, project.present_actor(), size=1))

    async def scene() -> None:
        doer = RemoteDoer(project.store, objects)
        assert len((await doer.do(one)).attempts) == 3
        [first] = pools(doer)
        await asyncio.sleep(IDLE_S / 3)
        await doer.do(one)
        assert pools(doer) == [first], "the second unit had the sandboxes of the first"
        ended_at = time.monotonic()
        while pools(doer):
            assert time.monotonic() - ended_at < IDLE_S + 10
            await asyncio.sleep(0.05)
        assert time.monotonic() - ended_at > IDLE_S * 0.9, "counted from the last unit"
        assert len(doer._sites) == 1, "its files stay"
        assert len((await doer.do(one)).attempts) == 3
        await doer.close()
        assert first._sandboxes == {}
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    asyncio.run(scene())
