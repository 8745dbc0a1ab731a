"""From the options of `agentloop gate` to its result: what is compared, checked before anything runs, and the run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from itertools import chain, count
from pathlib import Path

from agentloop.errors import ConfigError, counted
from agentloop.gate.bank import MIN_TRIALS, Bank, Evals, bank_path, load_bank, unknown_program
from agentloop.gate.drift import controls_for
from agentloop.gate.environment import Change, Environment, compare
from agentloop.gate.flaky import active, read_quarantine, said
from agentloop.gate.fold import Fold
from agentloop.gate.live import Budget, Run, roll_out
from agentloop.gate.outcomes import GateResult, GateVerdict, Header, Outcome, Settings, Side, SuitePart
from agentloop.gate.result import result_of
from agentloop.gate.summary import ENDS
from agentloop.output_files import write_text
from agentloop.protocols import SandboxBackend
from agentloop.rollout.actors import Actor
from agentloop.store.store import Store
from agentloop.types import content_hash
from agentloop_cli.baselines import find_baselines, is_same_version
from agentloop_cli.evals import Found, boxes, evals_at, kept_in, rolling
from agentloop_cli.render import LiveProgress, stderr
from agentloop_cli.tapes import Taped, Tapes, one_a_visit, playing

RESULT = "gate.result.json"
"""In the run's folder: what it came to, as `--json` prints it."""
EVERY = 200
"""Trials between two lines of progress where there is no terminal."""


@dataclass(frozen=True)
class Prepared:
    """What is compared, checked before anything runs."""

    found: tuple[Found, ...]
    header: Header
    banks: tuple[Bank, ...]
    candidates: dict[str, Actor]
    """By suite."""
    taped: dict[str, Taped]
    """By suite; empty where no tape is played."""
    backend: SandboxBackend
    baselines: dict[str, Actor]
    """By suite: the policies that filled the banks; empty where `no_baseline` says why they cannot be rolled out."""
    no_baseline: str | None

    @property
    def bank(self) -> list[Outcome]:
        """Of all suites."""
        return [outcome for bank in self.banks for outcome in bank.outcomes]

    @property
    def made_of(self) -> dict[str, str]:
        """What has to be the same for the run to be continued, beyond the header."""
        return {
            "candidate": content_hash({suite: actor.identity.hash for suite, actor in self.candidates.items()}),
            "baseline": content_hash({bank.head.suite: bank.head.identity for bank in self.banks}),
        }

    @property
    def key(self) -> str:
        """The same for the same command, so that it continues; more rollouts are no other gate."""
        header = self.header.model_dump(mode="json", exclude={"settings": {"max_rollouts"}})
        return content_hash([header, self.made_of])[:8]


def prepare(
    suites: Sequence[str],
    baseline: str,
    candidate: str,
    settings: Settings,
    patterns: Sequence[str],
    project: Path,
    tapes: Tapes,
    sandbox: str | None,
    baseline_project: Path | None = None,
) -> Prepared:
    """patterns: ids of tasks that must pass, beside those tagged so. sandbox: as for `boxes`.

    baseline_project: folder in which the baseline's policy is found; None is `project`.

    Raises ConfigError for banks and policies that do not fit, NoTasks for a suite without any, SandboxUnavailable.
    """
    weights = [_weighed(text) for text in suites]
    if baseline.endswith(".jsonl") and len(weights) > 1:
        raise ConfigError(f"--baseline {baseline}: one bank for several suites; give the name that each has one by")
    found = tuple(evals_at(path) for path, _ in weights)
    names = [one.evals.name for one in found]
    if len(set(names)) < len(names):
        raise ConfigError(f"two suites of one name ({', '.join(names)}); rename one, or gate them apart")
    banks = tuple(
        load_bank(bank_path(one.evals, baseline), one.evals, min_trials=max(MIN_TRIALS, settings.per_visit or 0))
        for one in found
    )
    candidates = {one.evals.name: one.resolve(candidate, project) for one in found}
    for one, bank in zip(found, banks, strict=True):
        if not bank.head.is_of_known_program:
            _note(unknown_program(bank_path(one.evals, baseline), one.evals))
    backend = boxes(sandbox, project)
    environments = _environments(found, banks, backend)
    taped = playing(found, banks, candidates, environments, baseline, tapes)
    header = Header(
        settings=one_a_visit(settings) if taped else settings,
        suites=tuple(_part(one.evals, weight, patterns) for one, (_, weight) in zip(found, weights, strict=True)),
        baseline=baseline,
        candidate=candidate,
        bank_trials=max(bank.head.trials for bank in banks),
        environment=_change(banks, environments),
    )
    baselines, no_baseline = find_baselines(found, banks, candidates, project, baseline_project)
    is_same = is_same_version(banks, candidates)
    header = header.model_copy(update={"is_same_version": is_same, "no_baseline": no_baseline})
    if not taped:  # a recording meets the banked trial of its own number
        controls = controls_for(header.environment, has_baseline=no_baseline is None)
        header = header.model_copy(update={"controls": controls})
    return Prepared(found, header, banks, candidates, taped, backend, baselines, no_baseline)


def _environments(found: Sequence[Found], banks: Sequence[Bank], backend: SandboxBackend) -> dict[str, Environment]:
    """Of each suite as it is now, with the packages that its bank names."""
    return {
        one.evals.name: one.environment(backend, bank.head.environment.packages if bank.head.environment else ())
        for one, bank in zip(found, banks, strict=True)
    }


def _change(banks: Sequence[Bank], environments: dict[str, Environment]) -> Change:
    """What the banks are compared in, at worst; a line for each suite in which that is not the same."""
    changes: list[Change] = []
    for bank in banks:
        change, why = compare(bank.head.environment, environments[bank.head.suite])
        changes.append(change)
        if change == "changed":
            _note(f"the environment of suite {bank.head.suite!r} has changed since its bank was filled: {why}")
        elif change == "unknown" and bank.head.is_of_known_program:
            _note(
                f"suite {bank.head.suite!r}: cannot tell whether the environment is the one in which its bank was "
                f"filled: {why}"
            )
    return max(changes, key=("same", "unknown", "changed").index)


def _note(line: str) -> None:
    stderr.print(f"note: {line}", markup=False, soft_wrap=True)


def _part(evals: Evals, weight: float, patterns: Sequence[str]) -> SuitePart:
    """patterns: as for `prepare`."""
    today, entries = datetime.now(UTC).date(), read_quarantine(evals.folder, evals.tasks)
    for line in said(entries, today):
        stderr.print(f"note: {line}", markup=False)
    aside = active(entries, today)
    must = {task for task in evals.tasks if any(fnmatchcase(task, pattern) for pattern in patterns)}
    must |= set(evals.must_pass)
    return SuitePart(
        name=evals.name,
        hash=evals.hash,
        weight=weight,
        tasks=tuple(task for task in evals.tasks if task not in must and task not in aside),
        must_pass=tuple(task for task in evals.tasks if task in must and task not in aside),
        quarantined=tuple(task for task in evals.tasks if task in aside),
        families=evals.families,
    )


def _weighed(text: str) -> tuple[Path, float]:
    """`SUITE` or `SUITE=WEIGHT`."""
    path, separator, weight = text.rpartition("=")
    if not separator or Path(text).exists():
        return Path(text), 1.0
    try:
        number = float(weight)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(f"{text}: {weight!r} is no weight above 0; write SUITE=2")
    return Path(path), number


def run_gate(
    prepared: Prepared,
    folder: Path,
    n_concurrent: int,
    max_usd: float | None,
    max_minutes: float | None,
    project: Path,
) -> GateResult:
    """Roll out in `folder` until there is a verdict, or go on there. A reason that ended it before stands first."""
    fold = Fold(prepared.header)
    with kept_in(folder, project) as store:
        run = Run(folder, prepared.header, prepared.bank, prepared.made_of)
        try:
            for outcome in run.outcomes:
                fold.add(outcome)
            if fold.decided is not None:
                more = "a larger --max-rollouts goes on" if fold.decided is GateVerdict.inconclusive else "see --out"
                stderr.print(f"{folder} has this gate's verdict already, and nothing was run; {more}", markup=False)
                stopped = None
            else:
                budget = Budget(max_usd, max_minutes, spent_usd=run.spent_usd)
                stopped = _rolled_out(prepared, fold, run, budget, store, n_concurrent, project)
        finally:
            run.close()
    result = result_of(fold)
    if stopped is not None:
        reasons = [reason for reason in result.reasons if not reason.startswith(ENDS)]
        if stopped != prepared.no_baseline:  # which the header has, so that the reasons say it
            reasons.insert(0, f"{stopped}.")
        result = result.model_copy(update={"reasons": tuple(reasons)})
    write_text(folder / RESULT, result.model_dump_json(indent=1) + "\n")
    return result


def folder_of(prepared: Prepared) -> Path:
    """Where this gate goes on, or begins: a new folder in runs/ once the last one has said PASS, FAIL or INFRA.

    A verdict is of the moment: an endpoint's model, or agentloop itself, may have changed since, which no key tells.
    """
    first = Path("runs") / f"gate-{prepared.key}"
    folders = chain([first], (Path(f"{first}-{n}") for n in count(2)))
    return next(folder for folder in folders if not _is_decided(folder / RESULT))


def _is_decided(path: Path) -> bool:
    """A result that says PASS, FAIL or INFRA: what was lost would stay lost. INCONCLUSIVE is gone on with."""
    if not path.is_file():
        return False
    said = json.loads(path.read_text(encoding="utf-8")).get("verdict")
    return said in (GateVerdict.passed.value, GateVerdict.failed.value, GateVerdict.infra.value)


def _rolled_out(
    prepared: Prepared,
    fold: Fold,
    run: Run,
    budget: Budget,
    store: Store,
    n_concurrent: int,
    project: Path,
) -> str | None:
    """Why it stopped before a verdict, if it did."""

    header = prepared.header
    known = len(run.outcomes) - run.n_banked
    with LiveProgress() as progress:
        if prepared.taped:
            stderr.print("the candidate is the policy of the bank's tape: what it asks again is played", markup=False)
        progress.start(f"gate: {header.candidate} against {header.baseline}", header.settings.max_rollouts)
        if known:
            stderr.print(f"continuing {run.folder}: {counted(known, 'trial')} are there already", markup=False)
            progress.advance(known)
        shown = LiveEvidence(fold, progress, known)

        async def work() -> str | None:
            sides = {Side.candidate: prepared.candidates, Side.baseline: prepared.baselines}
            named = f"gate/{header.settings.seed}/{prepared.made_of['candidate'][:16]}"
            async with rolling(
                prepared.found, sides, prepared.backend, store, project=project, run=named, taped=prepared.taped
            ) as runner:
                return await roll_out(
                    fold,
                    runner,
                    run,
                    n_concurrent=n_concurrent,
                    budget=budget,
                    no_baseline=prepared.no_baseline,
                    on_added=lambda _: shown.advance(),
                )

        return asyncio.run(work())


class LiveEvidence:
    """The e-values while they grow: in the bar of a terminal, or now and then in a line."""

    def __init__(self, fold: Fold, progress: LiveProgress, n: int) -> None:
        self._fold, self._progress, self._n = fold, progress, n

    def advance(self) -> None:
        """One trial more."""
        self._n += 1
        begun = [suite for suite in self._fold.suites if suite.bets.n]
        if not begun:
            self._progress.advance()
            return
        worst = max(begun, key=lambda one: one.log_e_fail - one.log_fail)
        least = min(begun, key=lambda one: one.log_e_pass - one.log_pass)
        drop, none = _bounded(worst.log_e_fail), _bounded(least.log_e_pass)
        figures = {"points": 100 * worst.bets.mean, "evidence of a drop": drop, "of none": none}
        self._progress.advance(1, **figures)
        if not stderr.is_terminal and self._n % EVERY == 0:
            told = f"evidence of a drop {drop:.0f} of {_bounded(worst.log_fail):.0f}, of none {none:.0f}"
            line = f"  {counted(self._n, 'trial')}: {told} of {_bounded(least.log_pass):.0f}"
            stderr.print(line, markup=False)


def _bounded(log: float) -> float:
    """e to that power, as far as a person would read it."""
    return float(2.718281828459045 ** min(log, 20.0))
