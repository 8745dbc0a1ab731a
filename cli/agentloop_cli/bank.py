"""`agentloop bank`: what a policy does on a suite, stored beside it for gates to compare with."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from agentloop.errors import ConfigError, counted
from agentloop_cli.render import AsJson, LiveProgress, percent, print_json, stderr, stdout

if TYPE_CHECKING:
    from agentloop.gate.bank import Bank, Evals


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
    out: Annotated[Path, typer.Option(help="Folder for the traces.")] = Path("runs/bank"),
    as_json: AsJson = False,
) -> None:
    """Fill the baseline bank of a suite: every task, the same number of times, with one policy.

    It is written to SUITE/baseline/NAME.jsonl when it is whole; a run that was
    interrupted goes on with the same command. Commit the file.

    Exit codes: 0 filled, 2 something named is wrong or a trial has no reward,
    4 a trial was lost to the infrastructure, 5 no tasks, 130 interrupted.
    """
    from agentloop.gate.bank import bank_path, fill_bank, new_head
    from agentloop.gate.outcomes import Side
    from agentloop_cli.evals import boxes, evals_at, kept_in, rolling
    from agentloop_cli.tapes import recording

    found = evals_at(suite)
    path = bank_path(found.evals, name)
    acting = found.resolve(policy, project)
    before = _before(path, found.evals)
    backend = boxes(sandbox, project)
    environment = found.environment(backend, acting.packages, acting.identity)
    head = new_head(found.evals, policy, acting.identity, trials, environment)
    with (
        LiveProgress() as progress,
        kept_in(out, project) as store,
        recording(found, path, project, tape, acting, environment) as taped,
    ):
        progress.start(f"bank: {policy} on {found.evals.name}", len(found.evals.tasks) * trials)

        async def fill() -> Bank:
            sides = {Side.baseline: {found.evals.name: acting}}
            run = f"bank/{acting.identity.hash}"
            async with rolling([found], sides, backend, store, project=project, run=run, taped=taped) as runner:
                return await fill_bank(
                    path,
                    head,
                    found.evals.tasks,
                    runner,
                    n_concurrent=n_concurrent,
                    on_done=lambda _: progress.advance(),
                )

        filled = asyncio.run(fill())
    document = _document(filled, path, found.evals, before)
    if as_json:
        print_json(document)
        return
    for line in _lines(document, suite, project):
        stdout.print(Text(line), soft_wrap=True)
    if document["failing"]:
        stderr.print(f"note: {_failing(document['failing'])}", markup=False)


def _before(path: Path, evals: Evals) -> Bank | None:
    """The bank that will be replaced, where it is one of the suite as it is."""
    from agentloop.gate.bank import load_bank

    try:
        return load_bank(path, evals, min_trials=1)
    except ConfigError:
        return None


def _document(bank: Bank, path: Path, evals: Evals, before: Bank | None) -> dict[str, Any]:
    from agentloop.gate.flaky import failing, flake_rates
    from agentloop.gate.reference import banked_a_visit

    costs = [outcome.cost_usd for outcome in bank.outcomes]
    known = [cost for cost in costs if cost is not None]
    n_mean, trials = len(evals.tasks) - len(evals.must_pass), bank.head.trials
    per_visit = banked_a_visit(n_mean, trials)  # of a gate of this suite alone
    replaced = before if before and before.head.identity != bank.head.identity else None
    return {
        "bank": str(path),
        **bank.head.model_dump(mode="json"),
        "split": evals.split,
        "n_tasks": len(evals.tasks),
        "n_trials": len(bank.outcomes),
        "mean_reward": _mean(bank),
        "cost_usd": sum(known) if len(known) == len(costs) else None,
        "n_visits": n_mean * (trials // per_visit),
        "per_visit": per_visit,
        "replaced_mean_reward": _mean(replaced) if replaced else None,
        "failing": failing(flake_rates(bank.outcomes), evals.must_pass),
    }


def _mean(bank: Bank) -> float:
    return sum(outcome.reward or 0.0 for outcome in bank.outcomes) / len(bank.outcomes)


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
