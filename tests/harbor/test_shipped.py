"""The tasks under evals/: each one's own solution scores 1, and doing nothing scores 0."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from parts import lacking

from agentloop.audit.cheats import known_cheats
from agentloop.audit.harbor import agents, audit
from agentloop.harbor.agents import Nobody, Oracle
from agentloop.harbor.roots import for_backend
from agentloop.harbor.run import run_tasks
from agentloop.harbor.task import find_tasks
from agentloop.harbor.trial import TrialAgent
from agentloop.sandbox.bubblewrap import BubblewrapBackend
from agentloop.sandbox.docker import DockerBackend
from agentloop.sandbox.engine import engine
from agentloop.store.store import Store

EVALS = Path(__file__).parents[2] / "evals" / "harbor"
BASE = "agentloop/python:1"


@pytest.fixture
def base(docker: DockerBackend) -> None:
    """The image that the tasks begin with."""
    from docker.errors import ImageNotFound

    try:
        with engine() as client:
            client.images.get(BASE)
    except ImageNotFound:
        lacking(f"no image {BASE}. Remedy: `sh sandboxes/base.sh && docker build -t {BASE} sandboxes/python`")


@pytest.mark.slow
@pytest.mark.usefixtures("base")
@pytest.mark.parametrize(("agent", "reward"), [(Oracle(), 1.0), (Nobody(), 0.0)], ids=["oracle", "nop"])
def test_each_shipped_task(docker: DockerBackend, tmp_path: Path, agent: TrialAgent, reward: float) -> None:
    store = Store(tmp_path / "store.db")
    tasks = find_tasks([EVALS])
    trials = asyncio.run(run_tasks(tasks, agent, docker, store, n_concurrent=2))
    assert len(trials) >= 6
    assert {t.task.id: (t.verdict.state.value, t.verdict.reward, t.trace.error) for t in trials} == {
        task.name: ("scored", reward, None) for task in tasks
    }
    assert store.n_traces() == len(trials)
    store.close()


@pytest.mark.slow
@pytest.mark.usefixtures("base")
def test_bubblewrap_runs_an_image_that_docker_made(bubblewrap: BubblewrapBackend, tmp_path: Path) -> None:
    """Agent code is held there by Landlock alone: a box has one user."""
    tasks = for_backend(find_tasks([EVALS / "off-by-one", EVALS / "backup-script"]), bubblewrap, tmp_path)
    cheats = [cheat for cheat in known_cheats() if cheat.name in ("rewarding-work", "exit-0", "leaked-expectations")]
    found = asyncio.run(audit(tasks, bubblewrap, trying=agents(1, cheats), n_concurrent=2))
    assert [(one.oracle, one.empty, one.n_cheats, one.problems) for one in found] == [([1.0], 0.0, 3, [])] * 2


def test_what_holds_agent_code_is_the_same_in_every_task() -> None:
    held = {path.read_bytes() for path in EVALS.glob("*/tests/apart.py")}
    assert len(held) == 1
