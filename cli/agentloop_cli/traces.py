"""`agentloop traces`: the group, and `ls`."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from agentloop.errors import ConfigError, did_you_mean
from agentloop.printable import on_one_line
from agentloop_cli.leaves import check_types, known_types
from agentloop_cli.render import AsJson, print_json, stderr, stdout
from agentloop_cli.stores import ProjectFolder, Tenant, Where, opened_store

# The store is imported when a command needs it: `--help` must answer at once.
if TYPE_CHECKING:
    from agentloop.store.store import Store
    from agentloop.store.tables import TraceSummary

traces = typer.Typer(help="List, show, import and export stored traces.", no_args_is_help=True)
HASH = re.compile(r"[0-9a-f]{64}")
N_DIGITS = 12
"""Shown of a hash in the name of a stage, such as `bank/HASH`."""
HEADINGS = ("trace", "age", "from", "by", "task", "reward", "failure", "steps", "answer")
KEPT = {"answer": 6, "failure": 12, "task": 8, "by": 6, "from": 7}
"""The columns that are cut where a terminal is too narrow, in this order, and the width that each keeps."""
GAP = "  "
AGES = (("d", 86_400), ("h", 3600), ("m", 60))
MAX_LISTED = 24
"""Known values that fit a message; of more, the first few are named."""


@traces.command("ls")
def list_traces(
    filter: Annotated[
        list[str] | None,
        typer.Argument(help="Only traces that match all terms, such as tool:shell reward<1; put -TERM after --."),
    ] = None,
    project: ProjectFolder = Path(),
    where: Where = None,
    tenant: Tenant = None,
    failure: Annotated[str | None, typer.Option(help="Only this failure type, such as call.malformed.")] = None,
    task: Annotated[str | None, typer.Option(help="Only this task.")] = None,
    version: Annotated[int | None, typer.Option(help="Only this policy version.")] = None,
    stage: Annotated[str | None, typer.Option(help="Only this stage, such as gate-v1.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many, the newest first.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List traces from every source, the newest first.

    Terms: id source session episode task stage pool split purpose state stop failure
    label tool model agent (a name; * is any letters; a,b is either); reward
    version steps tools spans errors duration cost tokens score.NAME (with
    : < <= > >=); error:true; since:7d until:2026-01-31; text:"some words".
    """
    criteria = {"failure": failure, "task": task, "version": version, "stage": stage}
    options = {name: str(value) for name, value in criteria.items() if value is not None}
    words = " ".join([*(filter or ()), *(_term(name, value) for name, value in options.items())])
    with opened_store(where, project=project) as store:
        rows = list(islice(store.every(words, project=tenant), limit))
        why_none = "" if rows else _why_none(store, options, " ".join(filter or ()), known_types(project, store))
    if as_json:
        print_json({"traces": [row.model_dump(mode="json", exclude={"key"}) for row in rows]})
    elif why_none:
        stderr.print(why_none, markup=False)
    else:
        headings = [Text(_heading(name), style="bold") for name in HEADINGS]
        _print_table([tuple(headings), *map(_cells, rows)])


def _term(name: str, value: str) -> str:
    """An option in the words of the filter; a stage is meant with every state of its suite."""
    if name == "stage" and re.fullmatch(r"[\w.*-]+", value):
        return f"stage:{value},{value}.*"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}:"{escaped}"'


def _why_none(store: Store, options: Mapping[str, str], filter: str, types: list[str]) -> str:
    """What to say of an empty list. Raises ConfigError for a value that is known nowhere, probably a typo."""
    if not store.n_traces():
        return "no traces yet; `agentloop loop` makes some, `agentloop traces import` and `agentloop serve` take some"
    values = {
        "failure": types,
        "task": store.values("task_id"),
        "version": [str(number) for number in store.values("policy_version")],
        "stage": list(dict.fromkeys(map(_stage, store.values("stage")))),
    }
    for name, value in options.items():
        if (_stage(value) if name == "stage" else value) not in values[name]:
            more = len(values[name]) > MAX_LISTED
            listed = ", ".join(values[name][:3] if more else values[name])
            listed += f", … {len(values[name])} in all" if more else ""
            raise ConfigError(f"--{name}: no {value!r} (known: {listed}){did_you_mean(value, values[name])}")
    check_types(filter, types)
    criteria = [*([filter] if filter else []), *(f"--{name} {value}" for name, value in options.items())]
    return f"no trace with {' '.join(criteria) or 'that --tenant'}"


def _stage(name: str | None) -> str:
    """Without the state of the suite: `gate-v1` of `gate-v1.1a2b3c`; nothing for a trace from elsewhere."""
    return (name or "").partition(".")[0]


def _short(digits: re.Match[str]) -> str:
    return digits[0][:N_DIGITS]


def _heading(name: str) -> str:
    return "started" if name == "age" and not sys.stdout.isatty() else name


def _cells(row: TraceSummary) -> tuple[Text, ...]:
    """One row; of the id, as much as is unique among millions, and in a pipe the whole."""
    colour = "" if row.reward is None else "green" if row.reward == 1.0 else "red"
    by = row.model or row.agent or "" if row.policy_version is None else f"v{row.policy_version}"
    name = row.name if row.name and row.name != f"chat {row.model}" else ""  # which says no more than `by`
    return (
        Text(row.id[:10] if sys.stdout.isatty() else row.id),
        Text(_when(row.started_at)),
        Text(on_one_line(HASH.sub(_short, _stage(row.stage or row.superseded)) or row.source)),
        Text(on_one_line(by)),
        Text(on_one_line(row.task_id or row.episode_id or name)),
        Text(row.reward_state if row.reward is None else f"{row.reward:g}", style=colour),
        Text(row.failure or ""),
        Text(str(row.n_steps)),
        Text(on_one_line(row.answer or row.error or "")),
    )


def _when(time: datetime | None) -> str:
    """How long ago, for a person; when, for a program."""
    if time is None:
        return ""
    at = time if time.tzinfo else time.replace(tzinfo=UTC)
    if not sys.stdout.isatty():
        return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    seconds = max(0, round((datetime.now(UTC) - at).total_seconds()))
    return next((f"{seconds // size}{unit}" for unit, size in AGES if seconds >= size), f"{seconds}s")


def _print_table(rows: list[tuple[Text, ...]]) -> None:
    """In columns. A pipe gets everything; in a terminal, the columns of KEPT give way when a line is too long."""
    widths = {heading: max(cell.cell_len for cell in column) for heading, *column in zip(HEADINGS, *rows, strict=True)}
    if sys.stdout.isatty():
        for heading, minimum in KEPT.items():
            excess = sum(widths.values()) + len(GAP) * (len(widths) - 1) - stdout.width
            widths[heading] -= max(0, min(excess, widths[heading] - minimum))
    for row in rows:
        for cell, (heading, width) in zip(row, widths.items(), strict=True):
            cell.truncate(width, overflow="ellipsis")
            cell.align("right" if heading in {"age", "reward", "steps"} else "left", width)
        line = Text(GAP).join(row)
        line.rstrip()
        stdout.print(line, soft_wrap=True)
