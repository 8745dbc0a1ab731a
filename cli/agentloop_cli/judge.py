"""`agentloop judge`: stored traces judged again, and what a person is asked about. `audit.py` is in the group, too."""

from __future__ import annotations

import asyncio
import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from agentloop.errors import counted
from agentloop.printable import on_one_line
from agentloop_cli.render import AsJson, LiveProgress, print_json, stderr, stdout
from agentloop_cli.stores import ProjectFolder, Where, open_store, same_store

if TYPE_CHECKING:
    from agentloop.judge.agreement import Figure
    from agentloop.judge.reader import Reader
    from agentloop.judge.rejudge import Account
    from agentloop.store.store import Store
    from agentloop.types import Task

NOTHING = 5
AGAIN = "again"
MAX_TOLD = 12
Tenant = Annotated[str, typer.Option("--tenant", help="The project (tenant) of the service.")]
Filter = Annotated[str, typer.Argument(help="Only traces for which it holds, such as 'state:disputed tool:shell'.")]


class FilterOrCommand(TyperGroup):
    """`agentloop judge FILTER` is `agentloop judge again FILTER`: a filter has a `:`, and no command has."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click."""
        if not args or (args[0] not in self.commands and args[0] not in ("--help", "-h")):
            args = [AGAIN, *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


judge = typer.Typer(help="Judge stored traces again, and settle what verifiers cannot.", cls=FilterOrCommand)


@judge.command(AGAIN)
def judge_again(
    filter: Filter = "",
    verifier: Annotated[list[str] | None, typer.Option(help="Run only this verifier; may be repeated.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also traces that nothing has changed for.")] = False,
    project: ProjectFolder = Path(),
    where: Where = None,
    as_json: AsJson = False,
) -> None:
    """Classify and score stored traces again, without running them again.

    What was there before stays in the history. Ctrl-C loses nothing, and
    the same command continues. What needs the agent's box keeps its score.
    Where `agentloop judge fit` has made a scorer, it is asked why runs failed
    of which the rules do not know it; then the model that `[failures.reader]`
    of agentloop.toml names, which costs what it costs.

    Exit codes: 0 done, 2 a filter or name is wrong, 5 no such trace.
    """
    from agentloop.failures.learned.scorer import load_scorer
    from agentloop.judge.rejudge import rejudge

    scorer, reader = load_scorer(project), _reader(project)
    store, tasks = _open(project, where), _tasks(project)
    try:
        with LiveProgress() as progress:
            progress.start("judge again", store.n_found(filter))
            account = asyncio.run(
                rejudge(
                    store,
                    tasks,
                    filter,
                    only=verifier or (),
                    again=everything,
                    scorer=scorer,
                    reader=reader,
                    on_batch=progress.advance,
                )
            )
    finally:
        store.close()
    if as_json:
        print_json(_document(account))
    else:
        _show(account)
        if account.n_unknown:
            same = same_store(project, where, None)
            traces = counted(account.n_unknown, "trace")
            stderr.print(
                Text(
                    f"{traces} from elsewhere without a reward, so `agentloop failures` does not count them. "
                    f"Next: `agentloop judge resolve ID --reward 0 --why …{same}`, or send "
                    "`PUT /api/v1/traces/ID/reward` to `agentloop serve`"
                )
            )
    if not account.n:
        raise typer.Exit(NOTHING)


@judge.command("queue")
def queue(
    sample: Annotated[int, typer.Option(min=0, max=1000, help="So many scored traces as well, by chance.")] = 0,
    tenant: Tenant = "default",
    project: ProjectFolder = Path(),
    where: Where = None,
    as_json: AsJson = False,
) -> None:
    """List what a person is asked about: disputed, waiting for one, and a sample."""
    store = _open(project, where)
    found = store.queue(tenant, sample=sample)
    said = {trace.id: store.verdict(tenant, trace.id).scores for trace, _ in found}
    store.close()
    if as_json:
        rows = [
            {"id": t.id, "why": why, "task": t.task_id, "answer": t.answer, "reward": t.reward,
             "scores": [score.model_dump(mode="json") for score in said[t.id]]}
            for t, why in found
        ]  # fmt: skip
        print_json({"queue": rows})
        return
    if not found:
        stderr.print("nobody is asked: nothing is disputed, and nothing waits for a person; --sample N takes some")
        return
    for trace, why in found:
        gave = ", ".join(f"{s.verifier} {s.error if s.value is None else f'{s.value:g}'}" for s in said[trace.id])
        stdout.print(on_one_line(f"{trace.id}  {why:9} {trace.task_id or ''}  {gave}"), soft_wrap=True)
    first = found[0][0].id
    same = same_store(project, where, None if tenant == "default" else tenant)
    resolve = f"agentloop judge resolve {first} --reward 1 --why …{same}"
    stderr.print(Text(f"next: `agentloop traces show {first}{same}`, then `{resolve}`"))


@judge.command("resolve")
def resolve_trace(
    trace_id: Annotated[str, typer.Argument(help="Its id, or how that begins.")],
    reward: Annotated[float, typer.Option(help="What it is worth, from 0 to 1.")],
    why: Annotated[str, typer.Option(help="What that rests on, in a few words.")],
    by: Annotated[str | None, typer.Option(help="Who says so; default: your user name.")] = None,
    tenant: Tenant = "default",
    project: ProjectFolder = Path(),
    where: Where = None,
    as_json: AsJson = False,
) -> None:
    """Say what a trace is worth. It stays in the history, with your name; the same again changes nothing."""
    from agentloop.judge.settle import resolve

    store = _open(project, where)
    try:
        trace_id = store.named(trace_id, project=tenant).id
        verdict = resolve(store, tenant, trace_id, reward, by=by or getpass.getuser(), why=why, tasks=_tasks(project))
    finally:
        store.close()
    if as_json:
        print_json({"verdict": verdict.model_dump(mode="json")})
    else:
        stdout.print(f"{trace_id} is {verdict.state} with reward {verdict.reward:g}", markup=False, soft_wrap=True)


@judge.command("history")
def show_history(
    trace_id: Annotated[str, typer.Argument(help="Its id, or how that begins.")],
    tenant: Tenant = "default",
    project: ProjectFolder = Path(),
    where: Where = None,
    as_json: AsJson = False,
) -> None:
    """Show every verdict on a trace: when, by whom, with which versions."""
    store = _open(project, where)
    try:
        found = store.history(tenant, store.named(trace_id, project=tenant).id)
    finally:
        store.close()
    if as_json:
        rows = [{**p._asdict(), "given_at": p.given_at.isoformat(), "verdict": p.verdict.model_dump(mode="json")}
                for p in found]  # fmt: skip
        print_json({"history": rows})
        return
    for past in found:
        verdict = past.verdict
        worth = verdict.state.value if verdict.reward is None else f"{verdict.reward:g}"
        gave = ", ".join(
            f"{s.verifier}@{s.version} {'-' if s.value is None else f'{s.value:g}'}" for s in verdict.scores
        )
        critical = verdict.critical.type.value if verdict.critical else ""
        by = past.by if past.supersedes is None else f"{past.by} (supersedes {past.supersedes})"
        line = f"{past.given_at:%Y-%m-%d %H:%M:%S}  {by:8} {worth:9} {critical}  {gave}  {past.why}"
        stdout.print(on_one_line(f"{line.rstrip()}  taxonomy {verdict.taxonomy or '-'}"), soft_wrap=True)


@judge.command("agreement")
def show_agreement(
    filter: Filter = "",
    tenant: Tenant = "default",
    project: ProjectFolder = Path(),
    where: Where = None,
    as_json: AsJson = False,
) -> None:
    """Measure how far each verifier agrees with people, and remember it.

    Exit codes: 0 measured, 5 no trace that both have judged.
    """
    from agentloop.judge.agreement import document, measure

    store = _open(project, where)
    try:
        found = measure(store, filter, project=tenant)
    finally:
        store.close()
    if as_json:
        print_json({"agreement": [document(each) for each in found]})
    elif found:
        table = Table(box=None, pad_edge=False)
        for heading in ("verifier", "version", "traces", "accuracy", "kappa", "Brier", "ECE"):
            table.add_column(heading, justify="left" if heading == "verifier" else "right")
        for a in found:
            table.add_row(a.verifier, a.version, str(a.n), *map(_figure, (a.accuracy, a.kappa, a.brier, a.ece)))
        stdout.print(table)
    if not found:
        stderr.print("no trace that a verifier and a person have judged; `agentloop judge queue --sample 50` has some")
        raise typer.Exit(NOTHING)


def _figure(figure: Figure) -> str:
    if figure.value is None:
        return "-"
    return f"{figure.value:.2f}" + ("" if figure.low is None else f" ({figure.low:.2f} to {figure.high:.2f})")


def _open(project: Path, where: str | None) -> Store:
    from agentloop.config.settings import known_secrets

    return open_store(where, project=project, create=False, secrets=known_secrets(project))


def _reader(project: Path) -> Reader | None:
    """The model that the settings name, remembering in the project's folder what it said."""
    from agentloop.config.settings import CONFIG_FILE, load_config
    from agentloop.costs.totals import price
    from agentloop.failures.taxonomy import project_taxonomy
    from agentloop.judge.reader import Reader

    if not (project / CONFIG_FILE).is_file() or (named := (config := load_config(project)).failures.reader) is None:
        return None
    cache = str(project / "traces" / "reader")
    return Reader(project_taxonomy(project), cache=cache, price=price(config.prices), **named.model_dump())


def _tasks(project: Path) -> dict[str, Task]:
    """Those of the project's suite, by id; none where there is no project, or it has no suite."""
    from agentloop.config.settings import CONFIG_FILE, load_config, suite_folder
    from agentloop.suites.suite import load_suite

    if not (project / CONFIG_FILE).is_file() or not (config := load_config(project)).project.suite:
        return {}
    return {task.id: task for task in load_suite(suite_folder(project, config)).tasks}


def _document(account: Account) -> dict[str, Any]:
    return dict(vars(account))  # dataclasses.asdict counts a Counter's pairs instead of keeping them


def _show(account: Account) -> None:
    words = {"unscored": "of unknown outcome"}  # as `agentloop failures` counts them
    worth = ", ".join(f"{n:,} {words.get(name, name)}" for name, n in sorted(account.worth.items()))
    stdout.print(f"{counted(account.n, 'trace')}: {worth}" if worth else "no traces", soft_wrap=True)
    stdout.print(
        f"  judged {account.n - account.n_same:,}, skipped {account.n_same:,} that are judged already; "
        f"verifiers ran for {account.n_rescored:,}; {counted(account.n_changed, 'verdict')} changed, "
        f"{account.n_relabelled:,} with other failures" + (f"; {account.cost_usd:.4f} USD" if account.cost_usd else ""),
        soft_wrap=True,
    )
    for title, counts in (("changed", account.changed), ("not scored again", account.why_not)):
        for reason, n in counts.most_common(MAX_TOLD):
            stdout.print(on_one_line(f"  {title}: {n:,}  {reason}"), soft_wrap=True)
