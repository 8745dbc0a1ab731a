"""`agentloop traces prune`: let go of old traces, once or, within `serve`, every few minutes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentloop.errors import ConfigError, StoreError, counted
from agentloop_cli.render import AsJson, print_json, stderr, stdout
from agentloop_cli.stores import ProjectFolder, Tenant, Where, open_store

if TYPE_CHECKING:
    from agentloop.store.retention import Forgotten
    from agentloop.store.store import Store

REFUSED = 1
EVERY_S = 600.0
ALWAYS = datetime.max.replace(tzinfo=UTC)
EMPTY = 1 << 20
"""Bytes, more than a store without traces has: none becomes as small as less."""


@dataclass(frozen=True)
class Limits:
    """What may stay, as it was written; checked, because it is asked for again and again."""

    older_than: str | None
    larger_than: str | None

    def __post_init__(self) -> None:
        self.before()
        self.max_bytes()

    def before(self) -> datetime | None:
        """What nothing was added to since then goes."""
        from agentloop.store.query import TIMES, time_of

        if self.older_than is None:
            return None
        try:
            return time_of(self.older_than, datetime.now(UTC))
        except (ValueError, OverflowError):
            raise ConfigError(f"{self.older_than!r} is no age; write {TIMES}") from None

    def max_bytes(self) -> int | None:
        """The oldest go until the store has as many."""
        from pydantic import ByteSize, TypeAdapter, ValidationError

        if self.larger_than is None:
            return None
        if self.larger_than[-1:].isdigit():  # which would be bytes, and never meant
            raise ConfigError(f"{self.larger_than!r} has no unit; say {self.larger_than}GB, or write 500MB or 8GiB")
        try:
            return int(TypeAdapter(ByteSize).validate_python(self.larger_than))
        except ValidationError:
            raise ConfigError(f"{self.larger_than!r} is no size; write 500MB, 10GB or 8GiB") from None


def prune_traces(
    older_than: Annotated[
        str | None, typer.Option(help="What nothing was added to for as long: 30d, 12h; or since a date.")
    ] = None,
    larger_than: Annotated[str | None, typer.Option(help="The oldest, until the store has 10GB, 500MB, 8GiB.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would go, by size about.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask, even where every trace would go.")] = False,
    project: ProjectFolder = Path(),
    where: Where = None,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Remove traces by age or size, oldest first.

    Messages that other traces share stay. So does what a loop of ours has
    made: it goes on from there.
    """
    limits = Limits(older_than, larger_than)
    if limits == Limits(None, None):
        raise ConfigError("say what may go: --older-than 30d, --larger-than 10GB, or both")
    store = open_store(where, project=project, create=False)
    try:
        if not dry_run and not yes:
            _confirm(store, limits, tenant)
        remove = store.forgettable if dry_run else store.forget
        gone = remove(before=limits.before(), max_bytes=limits.max_bytes(), project=tenant)
        size = store.size()
    finally:
        store.close()
    if as_json:
        print_json({**gone._asdict(), "size": size, "dry_run": dry_run})
        return
    stdout.print(f"{_told(gone)}{' would go' if dry_run else ' removed'}; the store has {_sized(size)}", soft_wrap=True)
    most = limits.max_bytes()
    if most is not None and size > most and not dry_run:
        stderr.print(
            "it is still larger: what is left belongs to a loop, which goes on from it, or to another --tenant"
        )


def _confirm(store: Store, limits: Limits, tenant: str | None) -> None:
    """Ask before every trace that may go does. Raises ConfigError without a terminal to ask at, Exit for a no."""
    everything = store.forgettable(before=ALWAYS, project=tenant)
    most = limits.max_bytes()
    too_small = most is not None and most < EMPTY < store.size()
    would = everything if too_small else store.forgettable(before=limits.before(), max_bytes=most, project=tenant)
    if not everything.traces or would.traces < everything.traces:
        return
    told = f"every trace would go: {_told(everything)}"
    if not sys.stdin.isatty():
        raise ConfigError(f"{told}; look with --dry-run, and add --yes if that is meant")
    if not typer.confirm(f"{told}; remove them?", err=True):
        stderr.print("nothing was removed")
        raise typer.Exit(REFUSED)


@contextmanager
def pruning(store: Store, limits: Limits) -> Iterator[None]:
    """While the block runs, prune now and every EVERY_S."""
    ended = threading.Event()

    def prune() -> None:
        while not ended.is_set():
            try:
                gone = store.forget(before=limits.before(), max_bytes=limits.max_bytes())
                if gone.traces:
                    stderr.print(f"pruned: {_told(gone)}")
            except StoreError as error:  # of a disk that is full, say: it may be better the next time
                stderr.print(f"pruning failed: {error}", markup=False)
            ended.wait(EVERY_S)

    thread = threading.Thread(target=prune, name="prune")
    if limits != Limits(None, None):
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.is_alive():
            thread.join()


def _told(gone: Forgotten) -> str:
    return f"{counted(gone.traces, 'trace')} ({counted(gone.spans, 'span')}, {_sized(gone.bytes)})"


def _sized(n_bytes: int) -> str:
    from pydantic import ByteSize

    return ByteSize(n_bytes).human_readable(decimal=True, separator=" ")
