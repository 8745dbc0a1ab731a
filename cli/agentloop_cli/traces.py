"""`agentloop traces`: look at what happened."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from agentloop.errors import ConfigError, did_you_mean
from agentloop_cli.render import AsJson, print_json, stderr, stdout

# The store is imported when a command needs it: `--help` must answer at once.
if TYPE_CHECKING:
    from agentloop.store.store import Store
    from agentloop.store.tables import TraceRow
    from agentloop.types import Failure, Step, ToolCall, Trace, Verdict

traces = typer.Typer(help="Look at stored traces.", no_args_is_help=True)
ProjectFolder = Annotated[Path, typer.Option("--project", "-p", help="Project folder.")]
HEADINGS = ("trace", "stage", "by", "task", "reward", "failure", "steps", "answer")
KEPT = {"answer": 6, "failure": 12, "task": 8}
"""The columns that are cut where a terminal is too narrow, in this order, and the width that each keeps."""
GAP = "  "
ESCAPED = {ord(space): repr(space)[1:-1] for space in "\n\t\u2028\u2029"}
MAX_LISTED = 24
"""Known values that fit a message; of more, the first few are named."""


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
    asked = {"failure": failure, "task": task, "version": version, "stage": stage}
    why_none = "" if rows else _why_none(store, {name: str(it) for name, it in asked.items() if it is not None})
    store.close()
    if as_json:
        print_json({"traces": [row.model_dump(mode="json", exclude={"body"}) for row in rows]})
    elif why_none:
        stderr.print(why_none, markup=False)
    else:
        _print_table([tuple(Text(heading, style="bold") for heading in HEADINGS), *map(_cells, rows)])


def _why_none(store: Store, asked: Mapping[str, str]) -> str:
    """What to say of an empty list. Raises ConfigError for a value that is known nowhere, probably a typo."""
    from agentloop.types import FailureType

    if not store.n_traces():
        return "no traces yet; `agentloop loop` makes some"
    known = {
        "failure": [kind.value for kind in FailureType],
        "task": store.values("task_id"),
        "version": [str(number) for number in store.values("policy_version")],
        "stage": list(dict.fromkeys(map(_stage, store.values("stage")))),
    }
    for name, value in asked.items():
        if (_stage(value) if name == "stage" else value) not in known[name]:
            more = len(known[name]) > MAX_LISTED
            listed = ", ".join(known[name][:3] if more else known[name])
            listed += f", … {len(known[name])} in all" if more else ""
            raise ConfigError(f"--{name}: no {value!r} (known: {_clean(listed)}){did_you_mean(value, known[name])}")
    return f"no trace with {' '.join(f'--{name} {value}' for name, value in asked.items())}"


def _stage(name: str | None) -> str:
    """Without the state of the suite: `gate-v1` of `gate-v1.1a2b3c`; nothing for a trace from elsewhere."""
    return (name or "").partition(".")[0]


def _cells(row: TraceRow) -> tuple[Text, ...]:
    """One row; of the id, as much as is unique among millions, and in a pipe the whole."""
    colour = "" if row.reward is None else "green" if row.reward == 1.0 else "red"
    return (
        Text(row.id[:10] if sys.stdout.isatty() else row.id),
        Text(_stage(row.stage)),
        Text("" if row.policy_version is None else f"v{row.policy_version}"),
        Text(_on_one_line(row.task_id or "")),
        Text(row.reward_state if row.reward is None else f"{row.reward:g}", style=colour),
        Text(row.failure or ""),
        Text(str(row.n_steps)),
        Text(_on_one_line(row.answer or "")),
    )


def _on_one_line(text: str) -> str:
    return _clean(text).translate(ESCAPED)


def _print_table(rows: list[tuple[Text, ...]]) -> None:
    """In columns. A pipe gets everything; in a terminal, the columns of KEPT give way when a line is too long."""
    widths = {heading: max(cell.cell_len for cell in column) for heading, *column in zip(HEADINGS, *rows, strict=True)}
    if sys.stdout.isatty():
        for heading, kept in KEPT.items():
            excess = sum(widths.values()) + len(GAP) * (len(widths) - 1) - stdout.width
            widths[heading] -= max(0, min(excess, widths[heading] - kept))
    for row in rows:
        for cell, (heading, width) in zip(row, widths.items(), strict=True):
            cell.truncate(width, overflow="ellipsis")
            cell.align("right" if heading in {"reward", "steps"} else "left", width)
        line = Text(GAP).join(row)
        line.rstrip()
        stdout.print(line, soft_wrap=True)


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
    version = None if trace.policy_version is None else f"policy v{trace.policy_version}"
    facts = (trace.task_id, version, row.stage, trace.isolation, f"{trace.duration_s:.2f} s")
    _print_block(Text(), Text(trace.id, style="bold"))
    _print_block(Text(), Text(_on_one_line(GAP.join(filter(None, facts)))))
    stdout.print()
    for message in trace.messages:
        _print_block(Text(f"{message.role}  ", style="dim"), Text(_clean(message.content)))
    if trace.steps:
        stdout.print()
    for step in trace.steps:
        _print_step(step, [f for f in verdict.failures if f.step == step.index])
    stdout.print()
    _print_end(trace, verdict)


def _print_block(lead: Text, text: Text, hang: Text | None = None) -> None:
    """`text` beside `lead`, its further lines beside `hang` or below its first; a pipe gets long lines whole."""
    hang = hang or Text(" " * lead.cell_len)
    width = max(20, stdout.width - lead.cell_len)
    for line in text.wrap(stdout, width) if sys.stdout.isatty() else text.split(allow_blank=True):
        shown = Text.assemble(lead, line)
        shown.rstrip()
        stdout.print(shown, soft_wrap=True)
        lead = hang


def _print_step(step: Step, failures: list[Failure]) -> None:
    said = step.completion.message
    lead = Text(f"{step.index:>3} ", style="dim")
    if said.content:
        _print_block(lead, Text(_clean(said.content)))
    for call in said.tool_calls:
        name = (_on_one_line(call.name or "(no tool)"), "bold cyan")
        _print_block(lead, Text.assemble(name, " ", _clean(_asked(call))))
    for result in step.results:
        bar = Text("  │ ", style="dim")
        _print_block(bar, Text(_clean(result.content.rstrip("\n")), style="" if result.ok else "red"), hang=bar)
    for failure in failures:
        _print_failure(failure)


def _asked(call: ToolCall) -> str:
    """The command or the answer; of a call that cannot be made, the arguments as they were written."""
    from agentloop.agents.tools import argument

    value, why_not = argument(call)
    return value if why_not is None else call.arguments


def _print_failure(failure: Failure) -> None:
    lead = Text("  ✗ ", style="bold red") if failure.critical else Text("  · ", style="yellow")
    said = f" “{_clean(failure.evidence)}” "
    _print_block(lead, Text.assemble((failure.type, "red"), said, (failure.detector, "dim")))


def _print_end(trace: Trace, verdict: Verdict) -> None:
    """What came of it: the answer and its reward, every verifier's word, and what was wrong with the whole."""
    answer = "nothing" if trace.answer is None else repr(_clean(trace.answer))
    reason = "" if trace.answer is not None else f" ({trace.stop_reason.replace('_', ' ')})"
    reward = f"no reward: {verdict.state}" if verdict.reward is None else f"reward {verdict.reward:g}"
    colour = "green" if verdict.reward == 1.0 else "red"
    _print_block(Text(), Text.assemble(f"submitted {answer}{reason}, ", (reward.replace("_", " "), colour)))
    for score in verdict.scores:
        gave = f"gave no number: {score.error}" if score.value is None else f"gave {score.value:g}"
        style = "red" if score.value is None else ""
        _print_block(Text("    "), Text(_clean(f"verifier {score.verifier} {gave}"), style=style))
    for failure in verdict.failures:
        if failure.step is None:
            _print_failure(failure)
    if trace.error and all(failure.evidence != trace.error for failure in verdict.failures):
        _print_block(Text("    "), Text(_clean(trace.error), style="red"))
