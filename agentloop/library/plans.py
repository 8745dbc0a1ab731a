"""`agentloop plan` and `agentloop collect`: between the two, another scheduler executes a run of suites."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from agentloop.config.settings import known_secrets, load_config
from agentloop.errors import ConfigError, NothingToDo, StateError, counted
from agentloop.gate.suites import EvalSuite, checked_evals, project_backend
from agentloop.harbor.images import images_for
from agentloop.library.actors import ActorOptions
from agentloop.library.rollouts import SuiteRun
from agentloop.library.runs import scores, who
from agentloop.objects.objects import Objects
from agentloop.protocols import SandboxBackend
from agentloop.registry.versions import Registry
from agentloop.remote.asks import FIRST, read_episodes
from agentloop.remote.bundle import put_bundle
from agentloop.remote.plan_folder import (
    PlanFolder,
    PlannedRun,
    PlannedSuite,
    PlannedUnit,
    objects_in,
    write_plan,
)
from agentloop.remote.sharing import Sharing
from agentloop.rollout.actors import Actor
from agentloop.rollout.plan import Planned
from agentloop.sandbox.pool import SandboxPool
from agentloop.store.attempts import Placed
from agentloop.store.place import open_store
from agentloop.store.store import Store
from agentloop.suites.suite import load_suite, load_suites
from agentloop.types import Attempt, Task
from agentloop.version import __version__
from agentloop.work.cohorts import cohorts_of
from agentloop.work.rollouts import PortableAsk, plan_hash, rollout_key, rollout_unit
from agentloop.work.stored import is_usable, read_attempts, sort_stored
from agentloop.work.work import Ask

MAX_NAMED = 8
"""Maximum number of shards that a message names one by one."""


@dataclass(frozen=True)
class PlanOptions:
    """The tasks, the actor, the number of attempts and the number of machines."""

    folders: Sequence[Path]
    """Suites in the project."""
    policy: str
    """REF; see `registry/refs.py`."""
    out: Path
    """Folder for the plan."""
    n_shards: int = 1
    n_trials: int = 1
    sandbox: str | None = None
    name: str | None = None
    """See `RunOptions`."""
    project: Path = Path()


def plan_suites(options: PlanOptions, note: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Write the attempts that `agentloop run` would make as a plan, and return the document of `--json`.

    note: gets remarks on tasks. Raises ConfigError for files that other machines cannot have and if `out` has
    another plan; NothingToDo if all attempts are stored.
    """
    load_config(options.project)
    suites = [checked_evals(suite) for suite in load_suites(options.folders)]
    actors = ActorOptions(policy=options.policy, project=options.project)
    acting = [actors.actor(suite) for suite in suites]
    for suite in suites:
        for remark in suite.suite.remarks:
            note(remark)
    backend = project_backend(options.sandbox, options.project, [actor.agent for actor in acting])
    secrets = known_secrets(options.project)
    with (
        TemporaryDirectory(prefix="agentloop-plan-") as scratch,
        closing(open_store(project=options.project, secrets=secrets)) as store,
        closing(objects_in(options.out, Path(scratch) / "cache")) as objects,
    ):
        bundle = put_bundle(options.project, objects, secrets)
        planning = _Planning(options, store, objects, bundle, backend)
        for suite, actor in zip(suites, acting, strict=True):
            planning.add(suite, actor)
        units = planning.units
        n_units = sum(unit.shard is not None for unit in units)
        if not n_units:
            raise NothingToDo("all attempts are stored already; --as NAME makes all of them again")
        run = PlannedRun(
            release=__version__,
            project=store.project,
            bundle=bundle,
            n_shards=options.n_shards,
            units="",
            agent=who(acting[0]),
            policy=acting[0].ref,
            version=acting[0].version,
            identity=acting[0].identity.hash,
            sandbox=backend.name,
            suites=tuple(planning.suites),
            versions=tuple(one for one in Registry(store).all() if one.number in {actor.version for actor in acting}),
        )
        write_plan(options.out, run, units)
    return {
        "plan": str(options.out),
        "n_shards": options.n_shards,
        "n_units": n_units,
        "n_stored": len(units) - n_units,
        "sandbox": backend.name,
        "stages": [suite.stage for suite in planning.suites],
    }


class _Planning:
    """Units of a plan, suite by suite."""

    def __init__(
        self, options: PlanOptions, store: Store, objects: Objects, bundle: str, backend: SandboxBackend
    ) -> None:
        self._options = options
        self._store = store
        self._sharing = Sharing(options.project, store, objects, bundle, takes_part=False)
        self._backend = backend
        self._n_seats = SandboxPool(backend).max_sandboxes
        self._n_missing = 0
        self.suites: list[PlannedSuite] = []
        self.units: list[PlannedUnit] = []

    def add(self, suite: EvalSuite, actor: Actor) -> None:
        """Plan the attempts of `actor` at the tasks of `suite`. Raises ConfigError if they cannot be made elsewhere."""
        run = SuiteRun(suite.suite, actor, self._backend, self._store, self._options.n_trials, self._options.name)
        with images_for(suite.suite.tasks, self._backend) as tasks:
            ask = run.ask(tasks)
            portable = self._portable(suite, ask)
        usable, others = sort_stored(self._store, ask, self._n_seats)
        first = ask.first
        for planned in cohorts_of(ask, self._n_seats):
            anew = any(episode.id in others for _, episode in planned)
            cohort = replace(ask, planned=planned, first=first, anew=anew)
            self._add_unit(ask, cohort, portable, is_stored=planned[0][1].id in usable)
            first += len(planned)
        self.suites.append(
            PlannedSuite(
                name=suite.evals.name,
                folder=self._folder_of(suite),
                stage=ask.stage,
                identity=actor.identity.hash,
                has_probes=not suite.suite.is_harbor,
            )
        )

    def _portable(self, suite: EvalSuite, ask: Ask) -> PortableAsk:
        project = self._options.project
        writer = self._sharing.writer([[suite.suite]], self._backend.name)
        if writer is None:
            raise ConfigError(
                f"suite {suite.suite.folder} is outside project {project.resolve()}, so a plan cannot have its files; "
                "move it into the project, or name the project with -p"
            )
        portable = writer.carry(ask)
        if portable is None:
            raise ConfigError(
                f"{ask.actor.ref} on suite {suite.evals.name!r} needs files outside project {project.resolve()}, or "
                "images that this command built, so a plan cannot have them; move them into the project, or use "
                "`agentloop run`"
            )
        return portable

    def _add_unit(self, ask: Ask, cohort: Ask, portable: PortableAsk, *, is_stored: bool) -> None:
        key = rollout_key(cohort, 0)
        unit = rollout_unit(key, cohort, plan_hash(ask), self._n_seats, portable.needs, portable.asks(cohort))
        # Shards take the missing units in turn, so they stay even if some attempts are stored.
        shard = None if is_stored else self._n_missing % self._options.n_shards
        self._n_missing += not is_stored
        tasks = tuple(dict.fromkeys(task.id for task, _ in cohort.planned))
        self.units.append(
            PlannedUnit(
                key=key,
                suite=len(self.suites),
                shard=shard,
                kind=unit.kind,
                asks=unit.asks,
                needs=unit.needs,
                tasks=tasks,
            )
        )

    def _folder_of(self, suite: EvalSuite) -> str:
        return suite.suite.folder.resolve().relative_to(self._options.project.resolve()).as_posix()


class Collected(NamedTuple):
    """A plan whose attempts are all in the store."""

    document: dict[str, Any]
    """That of `agentloop run --json`."""
    failed_shards: list[int]
    """Shards with an attempt that was lost to the infrastructure or has no reward."""


def collect_plan(folder: Path, project: Path) -> Collected:
    """Store all attempts of the plan in `folder`, in one transaction. Those that are stored already stay.

    Raises StateError, and stores nothing, if a unit has no result; ConfigError for a folder that cannot be used, or a
    plan of another project.
    """
    with (
        TemporaryDirectory(prefix="agentloop-collect-") as scratch,
        _opened(folder, Path(scratch)) as plan,
        closing(open_store(project=project, secrets=known_secrets(project))) as store,
    ):
        if store.project != plan.run.project:
            raise ConfigError(
                f"{folder} is a plan of project {plan.run.project!r}, and {store.name} has {store.project!r} here; "
                "name the project's folder with -p"
            )
        collecting = _Collecting(plan, store)
        store.put_placed(collecting.placed)
        runs = collecting.stored()
        run = plan.run
        document = {
            "agent": run.agent,
            "policy": run.policy,
            "version": run.version,
            "identity": run.identity,
            "sandbox": run.sandbox,
            "stages": [suite.stage for suite in run.suites],
            "n_continued": collecting.n_continued,
            **scores([(suite.name, attempts) for suite, attempts in zip(run.suites, runs, strict=True)]),
            "store": str(store.path or store.name),
        }
        return Collected(document, collecting.failed_shards)


@contextmanager
def _opened(folder: Path, scratch: Path) -> Iterator[PlanFolder]:
    plan = PlanFolder(folder, scratch / "cache")
    with closing(plan.objects):
        yield plan


class _Collecting:
    """The attempts of a plan: those in the store, and those to store."""

    def __init__(self, plan: PlanFolder, store: Store) -> None:
        """Raises StateError for a unit without a result."""
        self._plan = plan
        self._store = store
        self._tasks = _tasks_of(plan)
        self._planned = {unit.key: self._planned_of(unit) for unit in plan.units}
        before = self._read()
        self.n_continued = 0
        self.placed: list[Placed] = []
        missing: list[PlannedUnit] = []
        for unit in plan.units:
            if self._is_usable(unit, before):
                # A usable unit that has a shard was stored by an earlier `collect` of this plan, which continues
                # nothing.
                self.n_continued += len(self._planned[unit.key]) if unit.shard is None else 0
            elif (attempts := self._attempts(unit)) is None:
                missing.append(unit)
            else:
                self._place(unit, attempts, before)
        # Checked for all units before anything is stored: a plan is collected as a whole or not at all.
        if missing:
            raise StateError(_why_missing(plan, missing))

    @property
    def failed_shards(self) -> list[int]:
        """Shards whose stored attempts cannot all be used; see `Collected`."""
        stored = self._read()
        units = [unit for unit in self._plan.units if not self._is_usable(unit, stored)]
        return sorted({unit.shard for unit in units if unit.shard is not None})

    def stored(self) -> list[list[Attempt]]:
        """The stored attempts of each suite, in plan order."""
        stored = self._read()
        runs: list[list[Attempt]] = [[] for _ in self._plan.run.suites]
        for unit in self._plan.units:
            runs[unit.suite] += [stored[episode.id] for _, episode in self._planned[unit.key]]
        return runs

    def _read(self) -> dict[str, Attempt]:
        return read_attempts(self._store, [one for planned in self._planned.values() for one in planned])

    def _planned_of(self, unit: PlannedUnit) -> list[Planned]:
        episodes = read_episodes(self._plan.objects, unit.asks, self._plan.run.version)
        return [(self._tasks[unit.suite][episode.task_id], episode) for episode in episodes]

    def _is_usable(self, unit: PlannedUnit, stored: Mapping[str, Attempt]) -> bool:
        identity = self._plan.run.suites[unit.suite].identity or None
        ids = [episode.id for _, episode in self._planned[unit.key]]
        return all(id in stored and is_usable(stored[id], identity) for id in ids)

    def _attempts(self, unit: PlannedUnit) -> list[Attempt] | None:
        """The attempts in the result of a unit, in plan order; None unless it has all of them."""
        result = None if unit.shard is None else self._plan.result(unit)
        by_id = {one.episode.id: one for one in result.attempts} if result is not None else {}
        ids = [episode.id for _, episode in self._planned[unit.key]]
        return [by_id[id] for id in ids] if set(ids) == set(by_id) else None

    def _place(self, unit: PlannedUnit, attempts: Sequence[Attempt], before: Mapping[str, Attempt]) -> None:
        anew = any(one.episode.id in before for one in attempts)
        stage = self._plan.run.suites[unit.suite].stage
        first = unit.asks[FIRST]
        self.placed += [Placed(stage, first + n, one, anew) for n, one in enumerate(attempts)]


def _tasks_of(plan: PlanFolder) -> list[dict[str, Task]]:
    """The tasks of each suite by id."""
    with plan.objects.use(plan.run.bundle) as files:
        return [{task.id: task for task in load_suite(files / suite.folder).tasks} for suite in plan.run.suites]


def _why_missing(plan: PlanFolder, missing: Sequence[PlannedUnit]) -> str:
    lost = next((unit for unit in missing if unit.shard is None), None)
    if lost is not None:
        return (
            f"attempts at task {lost.tasks[0]!r} were stored when {plan.folder} was planned, and are not in the store "
            "any more; make the plan again in a new folder"
        )
    shards = sorted({unit.shard for unit in missing if unit.shard is not None})
    n_units = sum(unit.shard is not None for unit in plan.units)
    return (
        f"{plan.folder} is not done: {len(missing)} of {counted(n_units, 'unit')} without a whole result, the first "
        f"of task {missing[0].tasks[0]!r}; {commands_of(plan.folder, shards)}, then collect again"
    )


def commands_of(folder: Path, shards: Sequence[int]) -> str:
    """The commands that execute shards again, for a message."""
    command = f"`agentloop execute {shlex.quote(str(folder))} --shard {shards[0]}`"
    if len(shards) == 1:
        return f"run {command}"
    named = ", ".join(map(str, shards[:MAX_NAMED]))
    more = f" and {len(shards) - MAX_NAMED} more" if len(shards) > MAX_NAMED else ""
    return f"run {command}, and the same for each of the shards {named}{more}"
