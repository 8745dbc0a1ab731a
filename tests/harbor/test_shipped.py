"""The tasks under evals/: each one's own solution scores 1, and doing nothing scores 0."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from agentloop.harbor.agents import Nobody, Oracle
from agentloop.harbor.run import run_tasks
from agentloop.harbor.task import find_tasks
from agentloop.harbor.trial import TrialAgent
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
        message = f"no image {BASE}. Remedy: `sh sandboxes/base.sh && docker build -t {BASE} sandboxes/python`"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)


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
