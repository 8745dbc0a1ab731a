"""`[work] shared`: the attempts of an open project are units of its store, which any worker may do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from agentloop.agents.selection import needs_sandbox
from agentloop.config.settings import known_secrets, suite_folder
from agentloop.failures.learned.scorer import load_scorer
from agentloop.loop.project import Project
from agentloop.objects.objects import Objects
from agentloop.objects.opened import open_objects
from agentloop.remote.asks import AskWriter
from agentloop.remote.bundle import put_bundle
from agentloop.store.store import Store
from agentloop.types import RunFacts, RunState
from agentloop.work.shared import UnitWork

LOOP = "loop"
"""Kind and name of the run: a project has one loop at a time."""


@contextmanager
def attempts_as_units(project: Project) -> Iterator[None]:
    """For the duration of a block. If an error ends it, the run stays open, and the next command continues that run.

    Raises ConfigError or ObjectError if the project cannot be given to workers elsewhere.
    """
    store = project.store
    objects = open_objects(project.folder)
    run = _begin(store, put_bundle(project.folder, objects, known_secrets(project.folder)))
    scorer = load_scorer(project.folder)
    guess = scorer.guess if scorer else None
    n_at_once = project.config.policy.max_concurrent
    writer = _writer(project, objects)
    project.work = UnitWork(store, project.pool, run.number, guess=guess, max_concurrent=n_at_once, carrier=writer)
    try:
        yield
        store.move_run(run.number, RunState.done)
    finally:
        objects.close()


def _begin(store: Store, bundle: str) -> RunFacts:
    """The run of these files: the one that was interrupted, or a new one."""
    run = store.begin_run(LOOP, LOOP, bundle=bundle)
    if run.bundle == bundle:
        return run
    store.move_run(run.number, RunState.cancelled, why="the files of the project changed")
    return store.begin_run(LOOP, LOOP, bundle=bundle)


def _writer(project: Project, objects: Objects) -> AskWriter | None:
    """None, having reported why, where other machines cannot have the tasks."""
    config = project.config
    suites = [suite_folder(project.folder, config)] if config.project.suite else []
    if config.train.variants is not None:
        suites.append(project.folder / config.train.variants)
    root = project.folder.resolve()
    outside = next((folder for folder in suites if not folder.resolve().is_relative_to(root)), None)
    if outside is not None or config.sandbox.journals is not None:
        why = f"{outside} is outside the project" if outside is not None else "[sandbox] journals are of one process"
        project.progress.say(f"this process makes all attempts: {why}")
        return None
    names = [folder.resolve().relative_to(root).as_posix() for folder in suites]
    is_needed = bool(suites) and needs_sandbox(config.agent, project.folder)
    base = project.base.identity().hash
    options = {"needs_sandbox": is_needed, "takes_part": config.work.takes_part}
    return AskWriter(objects, project.suite.tasks, names, base, **options)
