"""What a person sees: progress on stderr, tables and one JSON document on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)


def print_json(document: Mapping[str, Any]) -> None:
    """One document on stdout, and nothing else there."""
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")


class LiveProgress:
    """A bar for the stage at work, a line for each that is done. See `loop.project.Progress`."""

    def __init__(self) -> None:
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<40}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[figures]}"),
            console=stderr,
            transient=False,
        )
        self._current: Any = None
        self._label, self._figures = "", ""

    def __enter__(self) -> LiveProgress:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    def start(self, stage: str, total: int) -> None:
        """See Progress."""
        self._end()
        self._label, self._figures = stage, ""
        if not stderr.is_terminal:
            stderr.print(f"  {stage} ({total:,})")
        self._current = self._bars.add_task(stage, total=total, figures="")

    def advance(self, n: int = 1, **figures: float) -> None:
        """See Progress."""
        if self._current is None:
            return
        if figures:
            self._figures = "  ".join(f"{name} {value:.2f}" for name, value in figures.items())
        self._bars.update(self._current, advance=n, figures=self._figures)

    def say(self, line: str) -> None:
        """See Progress."""
        self._end()
        stderr.print(f"[bold]•[/bold] {line}")

    def _end(self) -> None:
        if self._current is not None:
            self._bars.stop_task(self._current)
            self._current = None


def percent(share: float) -> str:
    """0.1234 -> 12.3%."""
    return f"{100 * share:.1f}%"


def print_summary(document: Mapping[str, Any]) -> None:
    """The end of a loop: versions with success and decisions, failures before and after, where things are."""
    table = Table(title="Policy versions on the held-out tasks", title_justify="left", box=None, pad_edge=False)
    for heading, justify in (("version", "left"), ("success", "right"), ("95% interval", "left"), ("decision", "left"), ("made by", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for version in document["versions"]:
        low, high = version["ci95"]
        decision = version["decision"] or "start"
        colour = {"promote": "green", "hold": "yellow", "roll_back": "red"}.get(decision, "dim")
        table.add_row(
            f"v{version['number']}" + (" (live)" if version["state"] == "live" else ""),
            percent(version["success"]),
            f"{percent(low)} to {percent(high)}",
            f"[{colour}]{decision.replace('_', ' ')}[/]",
            version["note"],
        )
    stdout.print()
    stdout.print(table)
    stdout.print()
    stdout.print(_failures(document))
    stdout.print()
    before, after = document["heldout"]["before"]["success"], document["heldout"]["after"]["success"]
    stdout.print(
        f"[bold]{percent(before)} -> {percent(after)}[/bold] on {document['heldout']['n']} held-out tasks; "
        f"decision: [bold]{document['decision'].replace('_', ' ')}[/bold]"
    )
    stdout.print(
        f"{document['episodes']:,} episodes, {document['tool_calls']:,} tool calls in {document['sandbox']} "
        f"({document['isolation']}), {document['wall_s']:.0f} s wall, {document['cpu_s']:.0f} s CPU, "
        f"{document['regression_cases']} regression cases pinned"
    )


def _failures(document: Mapping[str, Any]) -> Table:
    before, after = document["failures"]["before"], document["failures"]["after"]
    table = Table(title="What went wrong (episodes)", title_justify="left", box=None, pad_edge=False)
    table.add_column("failure type")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for kind in sorted({*before, *after}, key=lambda k: -before.get(k, 0)):
        table.add_row(kind, str(before.get(kind, 0)), str(after.get(kind, 0)))
    return table
