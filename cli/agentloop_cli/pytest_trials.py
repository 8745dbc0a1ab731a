"""What the pytest plugin does with a suite: trials of its tasks, in one process.

A worker of xdist has its own, and hands outcomes over as properties of its reports (`pytest_plugin.py`). What they come
to together is decided elsewhere (`pytest_decision.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from functools import cached_property
from pathlib import Path
from statistics import fmean

import pytest

from agentloop.errors import ConfigError, SandboxUnavailable, counted
from agentloop.gate import trials as gate_trials
from agentloop.gate.bank import Bank, Evals, bank_path, load_bank
from agentloop.gate.environment import Environment
from agentloop.gate.eprocess import MAX_RUNS, Case, reliability
from agentloop.gate.flaky import active, read_quarantine
from agentloop.gate.outcomes import Outcome, Settings, Side
from agentloop.gate.taped import TapedTrials, refusal
from agentloop.loop.refs import resolve
from agentloop.printable import clean
from agentloop.protocols import Policy, SandboxBackend
from agentloop.recordings.answers import SUFFIX, Mode, Tape, read_tape
from agentloop.rollout.actors import Actor
from agentloop.sandbox.pool import SandboxPool
from agentloop.store.store import Store
from agentloop.types import Attempt, Trace, Verdict
from agentloop_cli.evals import Found, evals_at, kept_in

NONE, BASELINE = "none", "baseline"
N_CONCURRENT = 4
"""Trials of one test at once."""
PREFIX = "agentloop."
N_TRIALS = 8
KEYS = ("suite", "trials", "gate", "must_pass", "budget_usd")


@dataclass(frozen=True)
class TrialResult:
    """One trial. attempt, trace and verdict are None for one that the tape covers: nothing ran."""

    outcome: Outcome
    attempt: Attempt | None

    @property
    def trace(self) -> Trace | None:
        """Of the attempt."""
        return self.attempt.trace if self.attempt else None

    @property
    def verdict(self) -> Verdict | None:
        """Of the attempt."""
        return self.attempt.verdict if self.attempt else None


@dataclass(frozen=True)
class Spec:
    """What a mark asks for."""

    suite: str
    trials: int
    gate: str | float
    must_pass: bool
    budget_usd: float | None


@dataclass
class Item:
    """One test under way."""

    spec: Spec
    task: str
    done: list[TrialResult] = field(default_factory=list)
    why_not: str | None = None
    """Why there can be no further trial."""


@dataclass(frozen=True)
class SuiteRun:
    """A suite, made ready in this process."""

    found: Found
    actor: Actor
    bank: Bank | None
    tape: Tape
    tape_path: Path | None
    runner: TapedTrials
    environment: Environment | None
    """None where no sandbox can be made; nothing is then covered by a tape."""


def today() -> date:
    """The day in UTC, as quarantines count it."""
    return datetime.now(UTC).date()


class Trials:
    """Of one process."""

    def __init__(self, config: pytest.Config) -> None:
        self.root, self.mode = config.rootpath, Mode(config.getoption("--agentloop-mode"))
        self.baseline: str | None = config.getoption("--agentloop-baseline")
        self.ref: str = config.getoption("--agentloop-policy")
        self.seed: int = config.getoption("--agentloop-seed")
        self.report: Path | None = config.getoption("--agentloop-report")
        self._n_trials: int | None = config.getoption("--agentloop-trials")
        self._sandbox: str = config.getoption("--agentloop-sandbox")
        self._budget_usd: float | None = config.getoption("--agentloop-budget-usd")
        worker = getattr(config, "workerinput", {})
        self.worker: str = worker.get("workerid", "main")
        self.n_workers: int = worker.get("workercount", 1)
        if self.mode is Mode.record and worker:
            raise ConfigError("--agentloop-mode=record writes one tape from one process; run it without xdist: -n0")
        self.runner = asyncio.Runner()
        self._open = ExitStack()
        self._suites: dict[str, SuiteRun] = {}
        self._found: dict[str, Found] = {}
        self._items: dict[str, Item] = {}
        self._attempts: dict[str, Attempt] = {}
        self._spent: dict[str | None, float] = {}

    # ------------------------------------------------------------------------------- what there is

    def spec(self, mark: pytest.Mark) -> Spec:
        """Raises ConfigError for what a mark cannot ask for."""
        given = dict(mark.kwargs)
        if mark.args or (unknown := [key for key in given if key not in KEYS]):
            what = "arguments without a name" if mark.args else repr(unknown[0])
            raise ConfigError(f"@pytest.mark.agentloop takes no {what}; it takes {', '.join(KEYS)}, each by its name")
        if "suite" not in given:
            raise ConfigError("@pytest.mark.agentloop: suite is missing; name its folder, or leave all of it out")
        trials, gate = self._n_trials or given.get("trials", N_TRIALS), given.get("gate", BASELINE)
        if not isinstance(trials, int) or trials < 1:
            raise ConfigError(f"@pytest.mark.agentloop: trials is {trials!r}; at least 1 is needed")
        if gate != BASELINE and not (isinstance(gate, int | float) and 0 <= gate <= 1):
            raise ConfigError(f"@pytest.mark.agentloop: gate is {gate!r}; 'baseline', or a mean reward from 0 to 1")
        return Spec(str(given["suite"]), trials, gate, bool(given.get("must_pass")), given.get("budget_usd"))

    def found(self, suite: str) -> Found:
        """Raises ConfigError for what is no suite of our own."""
        if suite not in self._found:
            if not (self.root / suite).is_dir():
                raise ConfigError(
                    f"no folder {suite!r} in pytest's root, {self.root}; name a suite from there, or set --rootdir"
                )
            found = evals_at(self.root / suite)
            if found.suite is None:
                raise ConfigError(f"{suite}: a folder of Harbor tasks; `agentloop gate` runs those")
            self._found[suite] = found
        return self._found[suite]

    def task_ids(self, mark: pytest.Mark) -> list[str]:
        """Those that a gate runs. Raises ConfigError, before anything is run, for whatever would end it later."""
        spec = self.spec(mark)
        found = self.found(spec.suite)
        read_quarantine(found.evals.folder, found.evals.tasks)
        if spec.gate == BASELINE and self.baseline is None:
            raise ConfigError(
                f"{spec.suite} is compared with a bank, and none is named: --agentloop-baseline NAME (or `none`, which "
                "compares nothing), or a gate of its own in the mark, such as gate=0.8"
            )
        if self.mode is Mode.record and (self.baseline is None or self.baseline == NONE):
            raise ConfigError(
                "--agentloop-mode=record makes a bank and its tape: name it with --agentloop-baseline NAME"
            )
        self.ready(spec.suite, spec.trials)
        return list(found.evals.tasks)

    def bank_file(self, evals: Evals) -> Path | None:
        """Where the bank is, if one is named."""
        return None if self.baseline in (None, NONE) else bank_path(evals, str(self.baseline))

    def ready(self, suite: str, n_trials: int) -> SuiteRun:
        """The suite with its bank, tape and policy. Raises ConfigError for those that are missing or do not fit."""
        known = self._suites.get(suite)
        if known is not None and (known.bank is None or known.bank.head.trials >= n_trials):
            return known
        found, bank, tape = self.found(suite), None, Tape()
        path = self.bank_file(found.evals)
        tape_path = path.with_suffix(SUFFIX) if path else None
        if path and self.mode is not Mode.record:
            bank = load_bank(path, found.evals, min_trials=n_trials)
        if self.mode is Mode.replay and tape_path is None:
            raise ConfigError(
                f"{suite}: --agentloop-mode=replay plays a bank's tape, and no bank is named; name one, or live"
            )
        if tape_path and self.plays(tape_path):
            tape = read_tape(tape_path)
        actor = found.resolve(self.ref, self.root)
        if bank and tape_path and self.plays(tape_path) and (why := refusal(bank.head, actor.identity)) is not None:
            raise ConfigError(f"{tape_path} is not played: {why}; ask the policy: --agentloop-mode=live")
        environment = self._environment(found, actor)
        taped = self._taped(found, actor, bank, tape, environment)
        self._suites[suite] = SuiteRun(found, actor, bank, tape, tape_path, taped, environment)
        return self._suites[suite]

    def _environment(self, found: Found, actor: Actor) -> Environment | None:
        try:
            return found.environment(self.backend, actor.packages, actor.identity)
        except SandboxUnavailable:
            return None

    def plays(self, tape_path: Path) -> bool:
        """Whether answers come from a tape; each trial is then compared with that of the tape alone."""
        return self.mode is Mode.replay or (self.mode is Mode.auto and tape_path.is_file())

    def _taped(
        self,
        found: Found,
        actor: Actor,
        bank: Bank | None,
        tape: Tape,
        environment: Environment | None,
    ) -> TapedTrials:
        assert found.suite is not None  # noqa: S101
        suite = found.suite

        def make(policy: Policy) -> gate_trials.Trials:
            acting = replace(actor, policy=policy)
            run = f"pytest/{self.seed}/{actor.identity.hash[:16]}/{suite.hash[:16]}"
            sides = {Side.candidate: acting, Side.baseline: acting}
            return gate_trials.Trials(suite.tasks, sides, self.pool, run=run, keep=self._keep, pauses_s=())

        return TapedTrials(
            make,
            actor.policy,
            tape,
            self.mode,
            identity=actor.identity.hash,
            suite_hash=suite.hash,
            price=actor.price,
            environment=environment,
            bank=bank.outcomes if bank else (),
        )

    @cached_property
    def pool(self) -> SandboxPool:
        """Boxes; none is made where a tape covers everything."""
        return SandboxPool(self.backend)

    @cached_property
    def backend(self) -> SandboxBackend:
        """What makes them. Raises SandboxUnavailable."""
        from agentloop_cli.main import make_backend

        return make_backend(self._sandbox, "--agentloop-sandbox")

    @cached_property
    def policy(self) -> Policy:
        """Of the session, without a suite."""
        return self._actor.policy

    @cached_property
    def _actor(self) -> Actor:
        return resolve(self.ref, self.root, (), "pytest")

    @cached_property
    def _store(self) -> Store | None:
        if self.report is None:
            return None
        return self._open.enter_context(kept_in(self.report / self.worker, self.root))

    def _keep(self, attempt: Attempt) -> None:
        self._attempts[attempt.trace.id] = attempt
        if self._store is not None:
            self._store.put_judged("pytest", [attempt])

    # ------------------------------------------------------------------------------------ a test

    def _item(self, node: pytest.Item) -> Item:
        if node.nodeid not in self._items:
            mark = node.get_closest_marker("agentloop")
            assert mark is not None  # noqa: S101
            task = node.callspec.params["agentloop_task"]  # type: ignore[attr-defined]
            self._items[node.nodeid] = Item(self.spec(mark), task)
        return self._items[node.nodeid]

    def next(self, node: pytest.Item) -> TrialResult:
        """The next trial. Skips the test when the budget is spent."""
        item = self._item(node)
        if len(item.done) >= item.spec.trials:
            raise ConfigError(
                f"{counted(item.spec.trials, 'trial')} of task {item.task!r} were asked for, and are done"
            )
        if (why := self._over(item.spec)) is not None:
            item.why_not = why
            pytest.skip(why)
        item.done.append(self.runner.run(self._one(item, len(item.done))))
        return item.done[-1]

    async def _one(self, item: Item, trial: int) -> TrialResult:
        side = Side.baseline if self.mode is Mode.record else Side.candidate
        outcome = await self.ready(item.spec.suite, item.spec.trials).runner(item.task, side, trial)
        for budget in (None, item.spec.suite):
            self._spent[budget] = self._spent.get(budget, 0.0) + (outcome.cost_usd or 0.0)
        return TrialResult(outcome, self._attempts.pop(outcome.trace_id or "", None))

    def _over(self, spec: Spec) -> str | None:
        """Why no trial may begin. Each worker has an even share."""
        budgets = ((None, self._budget_usd, "--agentloop-budget-usd"), (spec.suite, spec.budget_usd, "budget_usd"))
        for key, usd, name in budgets:
            if usd is not None and self._spent.get(key, 0.0) >= usd / self.n_workers:
                return f"{name} {usd:g} is spent"
        return None

    def last_trace(self, node: pytest.Item) -> Trace:
        """Fails the test where there is none."""
        traces = [one.trace for one in self._item(node).done if one.trace is not None]
        if not traces:
            pytest.fail(
                "no trial of this test has a trace: call `rollout` first; one on the tape is not run", pytrace=False
            )
        return traces[-1]

    def finish(self, node: pytest.Item) -> None:
        """Run the trials that are left, tell all, and say what is wrong with the task by itself."""
        item = self._item(node)
        self.runner.run(self._rest(item))
        outcomes = [one.outcome for one in item.done]
        run = self.ready(item.spec.suite, item.spec.trials)
        kind = self._kind(item, run)
        told = {"suite": item.spec.suite, "trials": item.spec.trials, "gate": item.spec.gate, "kind": kind}
        node.user_properties += [(PREFIX + name, str(value)) for name, value in told.items()]
        node.user_properties += [
            (PREFIX + "outcome", outcome.model_dump_json(exclude_defaults=True)) for outcome in outcomes
        ]
        rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
        if 0 < (n_passed := sum(reward >= 1 for reward in rewards)) < len(rewards):
            node.user_properties.append((PREFIX + "flaky", f"{n_passed} of {len(rewards)} trials passed"))
        if kind != "quarantined":
            self._refuse(item, outcomes, kind, run)
        if item.why_not:
            pytest.skip(item.why_not)
        if not rewards:
            pytest.skip(clean(f"lost: {outcomes[0].why or 'nobody said why'}"))

    async def _rest(self, item: Item) -> None:
        slots = asyncio.Semaphore(N_CONCURRENT)

        async def one(trial: int) -> TrialResult | None:
            async with slots:
                item.why_not = self._over(item.spec) or item.why_not
                return None if item.why_not else await self._one(item, trial)

        rest = [one(trial) for trial in range(len(item.done), item.spec.trials)]
        item.done += [rolled for rolled in await asyncio.gather(*rest) if rolled is not None]

    def _kind(self, item: Item, run: SuiteRun) -> str:
        entries = read_quarantine(run.found.evals.folder, run.found.evals.tasks)
        if item.task in active(entries, today()):
            return "quarantined"
        return "must_pass" if item.spec.must_pass or item.task in run.found.evals.must_pass else "mean"

    def _refuse(self, item: Item, outcomes: Sequence[Outcome], kind: str, run: SuiteRun) -> None:
        rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
        why = next((o.why for o in outcomes if o.reward is not None and o.reward < 1 and o.why), "nobody said why")
        told = clean(f"{sum(reward >= 1 for reward in rewards)} of {len(rewards)} trials passed; {why}")
        if isinstance(item.spec.gate, int | float) and rewards and fmean(rewards) < item.spec.gate:
            pytest.fail(f"mean reward {fmean(rewards):.3f} is below {item.spec.gate:g}: {told}", pytrace=False)
        if kind == "must_pass":
            settings, evals = Settings(), run.found.evals
            n_cases = len(evals.tasks) if item.spec.must_pass else 2 * len(evals.must_pass)  # half is the mean's
            banked = [o.reward for o in run.bank.outcomes if o.task_id == item.task] if run.bank else []
            case = Case(
                reliability([reward for reward in banked if reward is not None], settings.reliability),
                n_cases / settings.alpha,
            )
            for reward in rewards[:MAX_RUNS]:
                case.add(reward >= 1)
                if case.broken:
                    pytest.fail(f"must pass, and is broken: {told}", pytrace=False)

    def close(self) -> None:
        """End boxes and files."""
        if "pool" in self.__dict__:
            self.runner.run(self.pool.close())
        self._open.close()
        self.runner.close()
