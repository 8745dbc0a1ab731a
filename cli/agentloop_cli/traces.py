"""`agentloop traces`: look at what happened."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from agentloop_cli.render import AsJson, print_json, stdout

# The store is imported when a command needs it: `--help` must answer at once.
if TYPE_CHECKING:
    from agentloop.store.store import Store
    from agentloop.store.tables import TraceRow
    from agentloop.types import Failure, Step, Trace, Verdict

traces = typer.Typer(help="Look at stored traces.", no_args_is_help=True)
ProjectFolder = Annotated[Path, typer.Option("--project", "-p", help="Project folder.")]


def _store(project: Path) -> Store:
    from agentloop.loop.project import STORE
    from agentloop.store.store import Store

    return Store(project / STORE, create=False)


def _clean(text: str) -> str:
    from agentloop.gate.report import clean

    return clean(text)


@traces.command("ls")
def list_traces(
    project: ProjectFolder = Path(),
    failure: Annotated[str | None, typer.Option(help="Only this failure type, such as call.malformed.")] = None,
    task: Annotated[str | None, typer.Option(help="Only this task.")] = None,
    version: Annotated[int | None, typer.Option(help="Only this policy version.")] = None,
    stage: Annotated[str | None, typer.Option(help="Only this stage, such as gate-v1.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, newest first.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List traces, newest first."""
    store = _store(project)
    rows = store.find_traces(limit=limit, failure=failure, task_id=task, policy_version=version, stage=stage)
    store.close()
    if as_json:
        print_json({"traces": [row.model_dump(mode="json", exclude={"body"}) for row in rows]})
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("trace", "stage", "by", "task", "reward", "failure", "steps", "answer"):
        table.add_column(heading, justify="right" if heading in {"reward", "steps"} else "left", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    stdout.print(table)


def _cells(row: TraceRow) -> tuple[str, ...]:
    reward = (
        "[green]1[/]"
        if row.reward == 1.0
        else f"[red]{row.reward:g}[/]"
        if row.reward is not None
        else row.reward_state
    )
    return (
        row.id[:10],
        row.stage.split(".")[0],
        f"v{row.policy_version}",
        escape(row.task_id),
        reward,
        row.failure or "",
        str(row.n_steps),
        escape(_clean(row.answer or "")[:16]),
    )


@traces.command("show")
def show_trace(
    trace_id: Annotated[str, typer.Argument(help="The id, or as much of its beginning as is unique.")],
    project: ProjectFolder = Path(),
    as_json: AsJson = False,
) -> None:
    """Show one trace: what was asked, done and seen, and why it failed."""
    store = _store(project)
    row, trace, verdict = store.trace(trace_id)
    store.close()
    if as_json:
        print_json({"trace": trace.model_dump(mode="json"), "verdict": verdict.model_dump(mode="json")})
        return
    stdout.print(
        f"[bold]{trace.id}[/]  {escape(trace.task_id)}  policy v{trace.policy_version}  {row.stage}  {trace.isolation}"
    )
    for message in trace.messages:
        stdout.print(Panel(Text(_clean(message.content)), title=message.role, title_align="left", border_style="dim"))
    for step in trace.steps:
        _print_step(step, [f for f in verdict.failures if f.step == step.index])
    _print_end(trace, verdict)


def _print_step(step: Step, failures: list[Failure]) -> None:
    said = step.completion.message
    if said.content:
        stdout.print(f"[dim]{step.index}[/] {escape(_clean(said.content))}")
    for call in said.tool_calls:
        name = call.name or "(no tool)"
        stdout.print(f"[dim]{step.index}[/] [bold cyan]{escape(_clean(name))}[/] {escape(_clean(call.arguments))}")
    for result in step.results:
        style = "" if result.ok else "red"
        for line in _clean(result.content).splitlines() or [""]:
            stdout.print(Text(f"    {line}", style=style))
    for failure in failures:
        _print_failure(failure)


def _print_failure(failure: Failure) -> None:
    mark = "[bold red]✗[/]" if failure.critical else "[yellow]·[/]"
    stdout.print(f"    {mark} [red]{failure.type}[/] “{escape(_clean(failure.evidence))}” [dim]{failure.detector}[/]")


def _print_end(trace: Trace, verdict: Verdict) -> None:
    for failure in verdict.failures:
        if failure.step is None:
            _print_failure(failure)
    answer = "nothing" if trace.answer is None else repr(_clean(trace.answer))
    reward = verdict.state.value if verdict.reward is None else f"reward {verdict.reward:g}"
    colour = "green" if verdict.reward == 1.0 else "red"
    stdout.print(f"{trace.stop_reason}: submitted {escape(answer)}, [{colour}]{reward}[/], {trace.duration_s:.2f} s")
    if trace.error:
        stdout.print(f"[red]{escape(_clean(trace.error))}[/]")
