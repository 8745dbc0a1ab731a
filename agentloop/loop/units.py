"""`[work] shared`: the attempts of an open project are units of its store instead of calls in its process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from agentloop.failures.learned.scorer import load_scorer
from agentloop.loop.project import Project
from agentloop.types import RunState
from agentloop.work.shared import UnitWork

LOOP = "loop"
"""Kind and name of the run: a project has one loop at a time."""


@contextmanager
def attempts_as_units(project: Project) -> Iterator[None]:
    """For the duration of a block. If an error ends it, the run stays open, and the next command continues that run."""
    store = project.store
    run = store.begin_run(LOOP, LOOP).number
    scorer = load_scorer(project.folder)
    guess = scorer.guess if scorer else None
    n_at_once = project.config.policy.max_concurrent
    project.work = UnitWork(store, project.pool, run, guess=guess, max_concurrent=n_at_once)
    yield
    store.move_run(run, RunState.done)
