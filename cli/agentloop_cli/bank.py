"""`agentloop bank`: what a policy does on a suite, stored beside it for gates to compare with."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from agentloop.config.layout import RUNS
from agentloop.errors import counted
from agentloop_cli.render import AsJson, LiveProgress, percent, print_json, stderr, stdout


def bank(
    suite: Annotated[Path, typer.Argument(help="A suite's folder, or one that holds Harbor tasks.")],
    policy: Annotated[str, typer.Option(help="REF: vN, live, FILE.toml, scripted:FILE.py:function, or oracle.")],
    name: Annotated[str, typer.Option("--as", help="Name of the bank: what `agentloop gate --baseline` is given.")],
    trials: Annotated[int, typer.Option(min=4, max=10_000, help="Of each task.")] = 16,
    tape: Annotated[
        bool, typer.Option("--tape", help="Keep every answer, too, so that an unchanged policy is gated at no cost.")
    ] = False,
    sandbox: Annotated[str | None, typer.Option(help="auto, docker or bubblewrap; overrides the settings.")] = None,
    n_concurrent: Annotated[int, typer.Option(min=1, help="Trials at once.")] = 4,
    project: Annotated[Path, typer.Option("--project", "-p", help="Where vN and paths of policies start.")] = Path(),
    out: Annotated[Path, typer.Option(help="Folder for the traces.")] = RUNS / "bank",
    as_json: AsJson = False,
) -> None:
    """Fill the baseline bank of a suite: every task, the same number of times, with one policy.

    It is written to SUITE/baseline/NAME.jsonl when it is whole; a run that was
    interrupted goes on with the same command. Commit the file.

    Exit codes: 0 filled, 2 something named is wrong or a trial has no reward,
    4 a trial was lost to the infrastructure, 5 no tasks, 130 interrupted.
    """
    from agentloop.gate.filling import BankOptions, fill

    options = BankOptions(suite, policy, name, trials, tape, sandbox, n_concurrent, project, out)
    with LiveProgress() as progress:
        document = fill(options, progress).document()
    if as_json:
        print_json(document)
    else:
        _show(document, suite, project)


def _show(document: Mapping[str, Any], suite: Path, project: Path) -> None:
    for line in _lines(document, suite, project):
        stdout.print(Text(line), soft_wrap=True)
    if document["failing"]:
        stderr.print(f"note: {_failing(document['failing'])}", markup=False)


def _lines(document: Mapping[str, Any], suite: Path, project: Path) -> Iterator[str]:
    path, mean, before = document["bank"], percent(document["mean_reward"]), document["replaced_mean_reward"]
    tasks = counted(document["n_tasks"], "held-out task" if document["split"] == "heldout" else "task")
    yield f"{path}: {tasks}, {document['trials']} trials of each, mean reward {mean}"
    if before is not None:
        yield f"replaces {path} of another policy ({percent(before)} -> {mean})"
    if document["n_visits"]:
        visits, each = counted(document["n_visits"], "visit"), counted(document["per_visit"], "banked trial")
        yield f"enough for {visits} of a gate, {each} each; docs/07-ci.md says how many it takes"
    where = "" if project == Path() else f" -p {shlex.quote(str(project))}"
    name = shlex.quote(Path(path).stem)
    yield f"commit it, then: agentloop gate {shlex.quote(str(suite))} --baseline {name} --candidate REF{where}"


def _failing(tasks: list[str]) -> str:
    return (
        f"must-pass but passed in under half of its trials: {', '.join(tasks)}; a gate can hardly find such a case "
        "broken: mend it, or take the tag away"
    )
