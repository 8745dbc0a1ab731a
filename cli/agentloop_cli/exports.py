"""`agentloop traces export`: stored traces into files that others read."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentloop.errors import ConfigError, NoSuchTrace, counted
from agentloop.printable import escape_json
from agentloop_cli.render import AsJson, LiveProgress, print_json, stderr
from agentloop_cli.stores import ProjectFolder, Tenant, Where, open_store

if TYPE_CHECKING:
    from agentloop.otel.stored import StoredTrace
    from agentloop.protocols import Exporter
    from agentloop.store.store import Store
    from agentloop.store.tables import TraceSummary

NOTHING = 5
STDOUT = Path("-")


@dataclass
class Account:
    """What was written."""

    format: str
    out: str
    traces: int = 0
    gone: int = 0
    """Traces that were removed after they were found."""
    bytes: int = 0
    seconds: float = 0.0

    def forget(self, _: TraceSummary) -> None:
        """One more that is gone."""
        self.gone += 1


def export_traces(
    ids: Annotated[list[str] | None, typer.Argument(help="Traces by id, or as much of it as is unique.")] = None,
    filter: Annotated[str, typer.Option(help="Those for which it holds, in the words of `traces ls`.")] = "",
    format: Annotated[
        str | None, typer.Option(help="jsonl, parquet, atif or otlp; default: as --out ends, or else jsonl.")
    ] = None,
    out: Annotated[Path, typer.Option(help="File to write, or for atif a new folder; - is stdout.")] = STDOUT,
    project: ProjectFolder = Path(),
    where: Where = None,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Export traces: all of them, some by id, or those of a filter.

    jsonl    a trace with its verdict a line; `traces import` takes it back
    parquet  a table, a row a trace, with messages, token ids and logprobs
    atif     Harbor's ATIF 1.8: a file a trace; a line each on stdout
    otlp     OpenTelemetry: a request a line, for any collector's /v1/traces

    A file is written whole or not at all. Exit code 5: no trace was found.
    """
    from agentloop.formats.export import load_exporter, save
    from agentloop.otel.stored import read_each

    exporter = load_exporter(format, out)
    _check(exporter, ids, filter, out, as_json)
    store = open_store(where, project=project, create=False)
    account = Account(exporter.name, str(out))
    started = time.monotonic()
    try:
        rows, total = _found(store, ids, filter, tenant)
        if not total:
            stderr.print(f"no trace with {filter}" if filter else "no traces yet", markup=False)
            raise typer.Exit(NOTHING)
        with LiveProgress() as progress:
            progress.start(f"export: {exporter.name}", total)
            traces = _counted(read_each(store, rows, account.forget), account, progress)
            account.bytes = _to_stdout(exporter, traces) if out == STDOUT else save(exporter, traces, out)
    finally:
        store.close()
    account.seconds = round(time.monotonic() - started, 3)
    if as_json:
        print_json(asdict(account))
    else:
        gone = f"; {counted(account.gone, 'trace')} gone meanwhile" if account.gone else ""
        told = f"{counted(account.traces, 'trace')}, {account.bytes:,} bytes"
        stderr.print(f"{told} written{'' if out == STDOUT else f' to {out}'}{gone}", markup=False)


def _check(exporter: Exporter, ids: list[str] | None, filter: str, out: Path, as_json: bool) -> None:
    """Raises ConfigError for options that cannot go together."""
    if ids and filter:
        raise ConfigError("IDS and --filter are two ways to choose; give one of them, such as --filter 'id:a*,b*'")
    if out == STDOUT and as_json:
        raise ConfigError("--json prints on stdout, where the traces go; name a file with --out")
    if out == STDOUT and "json" not in exporter.media_type and sys.stdout.isatty():
        raise ConfigError(f"{exporter.name} is no text for a terminal; name a file with --out")


def _found(store: Store, ids: list[str] | None, filter: str, tenant: str | None) -> tuple[Iterator[TraceSummary], int]:
    """What is asked for, and how many they are."""
    if not ids:
        return store.every(filter, project=tenant), store.n_found(filter, project=tenant)
    rows = {row.key: row for row in (_named(store, each, tenant) for each in ids)}
    return iter(rows.values()), len(rows)


def _named(store: Store, word: str, tenant: str | None) -> TraceSummary:
    """As `Store.named`. Raises ConfigError for what reads like a filter and is nobody's id."""
    try:
        return store.named(word, project=tenant)
    except NoSuchTrace:
        if not set(word) & set(":<>="):
            raise
        raise ConfigError(f"{word!r} is no trace's id; for a filter, write --filter {shlex.quote(word)}") from None


def _counted(traces: Iterator[StoredTrace], account: Account, progress: LiveProgress) -> Iterator[StoredTrace]:
    for trace in traces:
        yield trace
        account.traces += 1
        progress.advance()


def _to_stdout(exporter: Exporter, traces: Iterator[StoredTrace]) -> int:
    n = 0
    for part in exporter.write(traces):
        n += len(part)
        sys.stdout.buffer.write(escape_json(part.decode()).encode() if "json" in exporter.media_type else part)
    sys.stdout.buffer.flush()
    return n
