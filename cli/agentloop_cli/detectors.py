"""`agentloop judge fit` and `detectors`: a scorer learned of people's labels, and how right each detector is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from agentloop.errors import ConfigError
from agentloop_cli.judge import Tenant
from agentloop_cli.render import AsJson, print_json, stderr, stdout
from agentloop_cli.stores import ProjectFolder, Where, open_store

if TYPE_CHECKING:
    from agentloop.judge.failures.calibration import Trust
    from agentloop.judge.failures.learned import Scorer
    from agentloop.judge.failures.measure import Row
    from agentloop.judge.labels import Read

COLUMNS = ("detector", "on", "promise", "precision", "recall", "silent")


def fit_scorer(
    labels: Annotated[Path, typer.Argument(help='Lines such as {"trace": ID, "step": 3, "type": "obs.misread"}.')],
    precision: Annotated[float, typer.Option(min=0, max=1, help="Share of what it says that shall be right.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Decides every random draw.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Default: traces/scorer.json of the project.")] = None,
    tenant: Tenant = "default",
    project: ProjectFolder = Path(),
    where: Where = None,
    as_json: AsJson = False,
) -> None:
    """Learn from labels of stored traces why runs fail of which rules do not know it.

    `agentloop judge` then asks it. What is shown was measured on traces of
    tasks that were held out; what it is not sure enough of, it does not say.

    Exit codes: 0 fitted, 2 too few labels or a wrong one.
    """
    from agentloop.judge.failures.fitting import fit
    from agentloop.judge.failures.learned import SCORER

    scorer = fit([each.to_learn for each in _labelled(labels, tenant, project, where)], seed=seed, precision=precision)
    path = out or project / SCORER
    path.parent.mkdir(parents=True, exist_ok=True)
    scorer.save(path)
    rows = [_of_head(name, trust, scorer) for name, trust in _heads(scorer)]
    if as_json:
        print_json({"scorer": str(path), "n_labels": scorer.n_labels, "n_tasks": scorer.n_tasks, "detectors": rows})
        return
    _show(rows)
    stderr.print(f"wrote {path}; next: `agentloop judge`, which asks it", markup=False, soft_wrap=True)


def show_detectors(
    labels: Annotated[
        Path | None, typer.Argument(help="A file of labels as for `fit`, or a folder of traces with AgentRx's.")
    ] = None,
    tenant: Tenant = "default",
    project: ProjectFolder = Path(),
    where: Where = None,
    as_json: AsJson = False,
) -> None:
    """Show how often each detector is right, and how often it says nothing.

    Rules are measured on the labels that you name; without any, the table has
    what was measured when they were made. A learned scorer shows what it did
    on traces held out when it was fitted. With 95% intervals.
    """
    from agentloop.judge.failures.learned import load_scorer
    from agentloop.judge.failures.measure import measure, read_folder
    from agentloop.types import FailureType

    if labels is None:
        rows = _unmeasured()
    elif labels.is_dir():
        rows = [_of_rule(row) for row in measure(read_folder(labels))]
    else:
        found = [each.to_measure for each in _labelled(labels, tenant, project, where)]
        rows = [_of_rule(row) for row in measure(found, sayable=frozenset(FailureType))]
    if scorer := load_scorer(project):
        rows += [_of_head(name, trust, scorer) for name, trust in _heads(scorer)]
    if as_json:
        print_json({"detectors": rows})
        return
    _show(rows)
    below = [row["detector"] for row in rows if row["on"] and (p := row["precision"]) and p["share"] < row["promised"]]
    if below:
        stderr.print(f"on, and below its promise here: {', '.join(below)}", soft_wrap=True)


def _labelled(path: Path, tenant: str, project: Path, where: str | None) -> list[Read]:
    from agentloop.judge.labels import labelled, read_labels

    if not path.is_file():
        raise ConfigError(f"{path}: no such file; write a line of JSON for each trace that you have looked at")
    labels, store = read_labels(path), open_store(where, project=project, create=False)
    try:
        return labelled(store, labels, project=tenant)
    finally:
        store.close()


def _unmeasured() -> list[dict[str, Any]]:
    """Every rule, with what is known of it without labels."""
    from agentloop.judge.failures.rules import ALL, MEASURED, is_on

    return [
        _row(each.id, is_on(each), each.min_precision, (known.n_right, known.n) if known else (0, 0), (0, 0), (0, 0))
        for each in ALL
        for known in (MEASURED.get(each.id),)
    ]


def _of_rule(row: Row) -> dict[str, Any]:
    said = (row.n_right, row.n_judged)
    found, silent = (row.n_found, row.n_to_find), (row.n_silent, row.n_failed)
    return _row(row.detector, row.on, row.min_precision, said, found, silent)


def _heads(scorer: Scorer) -> list[tuple[str, Trust]]:
    heads = {"step": scorer.steps, "type": scorer.categories, "outcome": scorer.outcomes}
    return [(name, head.trust) for name, head in heads.items() if head is not None]


def _of_head(name: str, trust: Trust, scorer: Scorer) -> dict[str, Any]:
    from agentloop.judge.failures.learned import DETECTOR

    said, found, silent = (trust.n_right, trust.n_said), (trust.n_right, trust.n), (trust.n - trust.n_said, trust.n)
    return _row(f"{DETECTOR} {name}", trust.cut is not None, scorer.precision, said, found, silent)


def _row(
    name: str, on: bool, promised: float, said: tuple[int, int], found: tuple[int, int], silent: tuple[int, int]
) -> dict[str, Any]:
    shares = {"precision": _share(*said), "recall": _share(*found), "says_nothing": _share(*silent)}
    return {"detector": name, "on": on, "promised": promised, "measured": said[1] > 0, **shares}


def _share(n_right: int, n: int) -> dict[str, Any] | None:
    from agentloop.intervals import wilson

    low, high = wilson(n_right, n)
    return {"n_right": n_right, "n": n, "share": n_right / n, "low": low, "high": high} if n else None


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if heading in ("detector", "on") else "right", no_wrap=True)
    for row in rows:
        first = _cell(row["precision"]) or "unmeasured"
        silent = f"{row['says_nothing']['share']:.2f}" if row["says_nothing"] else "-"
        on = "on" if row["on"] else "off"
        table.add_row(row["detector"], on, f"{row['promised']:.2f}", first, _cell(row["recall"]) or "-", silent)
    stdout.print(table, soft_wrap=True)


def _cell(share: dict[str, Any] | None) -> str:
    return f"{share['share']:.2f} {share['low']:.2f}-{share['high']:.2f}" if share else ""
