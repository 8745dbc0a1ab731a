"""`agentloop flaky`: how often cases contradict themselves, and the quarantine of those that do it too often."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from agentloop.errors import ConfigError, did_you_mean
from agentloop.printable import on_one_line
from agentloop_cli.render import AsJson, print_json, stderr, stdout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentloop.gate.bank import Evals
    from agentloop.gate.flaky import FlakeRate, Quarantined

DAYS = 14


def flaky(
    suite: Annotated[Path, typer.Argument(help="A suite's folder.")],
    bank: Annotated[str, typer.Option(help="Name of a bank in SUITE/baseline, or the path of one.")],
    quarantine: Annotated[str | None, typer.Option(metavar="TASK", help="Let this task decide nothing.")] = None,
    reason: Annotated[str | None, typer.Option(help="Of the quarantine; it is shown in every report.")] = None,
    days: Annotated[int, typer.Option(min=1, max=90, help="Until it counts again by itself.")] = DAYS,
    release: Annotated[str | None, typer.Option(metavar="TASK", help="Let this task count again now.")] = None,
    as_json: AsJson = False,
) -> None:
    """How often the tasks of a suite contradict themselves, from a bank's trials.

    The rate is the share of the rarer result: 0% for a task that always
    passes, and for one that always fails. FLAKY stands beside what has been
    shown to flake more often than a must-pass case may; the mean of a suite
    can live with it.

    Exit codes: 0 listed or written, 2 something named is wrong.
    """
    from agentloop.gate.bank import bank_path, load_bank
    from agentloop.gate.flaky import FILE, failing, flake_rates, read_quarantine, said, write_quarantine
    from agentloop.gate.suites import evals_at

    evals = evals_at(suite).evals
    rates = flake_rates(load_bank(bank_path(evals, bank), evals).outcomes)
    today = datetime.now(UTC).date()
    before = entries = read_quarantine(evals.folder, evals.tasks)
    if release is not None:
        entries = _without(entries, release)
    if quarantine is not None:
        entries = _with(entries, evals, quarantine, reason, days, rates)
    elif reason is not None:
        raise ConfigError("--reason is of a quarantine; name its task with --quarantine")
    if entries != before:
        write_quarantine(evals.folder, entries)
    if as_json:
        print_json(_document(rates, entries))
        return
    with stdout.capture() as shown:
        stdout.print(_table(rates, evals, entries))
    for row in map(Text.from_ansi, shown.get().splitlines()):
        row.rstrip()  # a table fills its columns up
        stdout.print(row, soft_wrap=True)
    if entries != before:
        stderr.print(f"wrote {evals.folder / FILE}; commit it", markup=False)
    if shaky := failing(rates, evals.must_pass):
        told = on_one_line(", ".join(shaky))
        stderr.print(f"note: must-pass but passed in under half of its trials: {told}; mend it", markup=False)
    for line in said(entries, today):
        stderr.print(on_one_line(line), markup=False)


def _with(
    entries: tuple[Quarantined, ...],
    evals: Evals,
    task: str,
    reason: str | None,
    days: int,
    rates: Mapping[str, FlakeRate],
) -> tuple[Quarantined, ...]:
    from agentloop.gate.flaky import quarantine as quarantined

    if task not in evals.tasks:
        raise ConfigError(f"no task {task!r} in suite {evals.name!r}{did_you_mean(task, evals.tasks)}")
    if not reason:
        raise ConfigError(f"--quarantine {task} needs --reason: who reads a report must know why it decides nothing")
    return quarantined(entries, task, reason, datetime.now(UTC).date(), days, rates.get(task))


def _without(entries: tuple[Quarantined, ...], task: str) -> tuple[Quarantined, ...]:
    names = [entry.task for entry in entries]
    if task not in names:
        there = ", ".join(names) or "none is"
        raise ConfigError(f"task {task!r} is not in quarantine ({there}){did_you_mean(task, names)}")
    return tuple(entry for entry in entries if entry.task != task)


def _document(rates: Mapping[str, FlakeRate], entries: tuple[Quarantined, ...]) -> dict[str, Any]:
    return {
        "tasks": [rate.model_dump(mode="json") for rate in rates.values()],
        "quarantine": [entry.model_dump(mode="json") for entry in entries],
    }


def _table(rates: Mapping[str, FlakeRate], evals: Evals, entries: tuple[Quarantined, ...]) -> Table:
    from agentloop.gate.outcomes import Settings

    table = Table(box=None, pad_edge=False)
    for heading in ("task", "passed", "flake rate", "95% interval", ""):
        is_id = heading == "task"  # which is never cut: it is what --quarantine takes
        table.add_column(
            heading, justify="left" if heading in ("task", "") else "right", overflow="fold", no_wrap=not is_id
        )
    reliability, quarantined = Settings().reliability, {entry.task for entry in entries}
    for rate in sorted(rates.values(), key=lambda rate: (-rate.low, -rate.rate, rate.task_id)):
        words = ["must-pass"] if rate.task_id in evals.must_pass else []
        words += ["FLAKY"] if rate.is_flaky(reliability) else []
        words += ["quarantine.toml"] if rate.task_id in quarantined else []
        table.add_row(
            Text(on_one_line(rate.task_id)),
            f"{rate.n_passed} of {rate.n}",
            f"{rate.rate:.0%}",
            f"{rate.low:.0%} to {rate.high:.0%}",
            ", ".join(words),
        )
    return table
