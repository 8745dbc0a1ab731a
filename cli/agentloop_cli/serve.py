"""`agentloop serve` and `agentloop keys`: the trace service, and who may use it."""

from __future__ import annotations

import socket
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from agentloop.errors import ConfigError, extra
from agentloop_cli.prune import Limits, pruning
from agentloop_cli.render import AsJson, print_json, stderr, stdout
from agentloop_cli.stores import Where, open_store

keys = typer.Typer(help="Keys of the trace service.", no_args_is_help=True)
LOOPBACK = {"127.0.0.1", "::1", "localhost"}
ENDING_S = 10
"""How long requests that are under way may take when the service ends."""


class Scope(StrEnum):
    """What a key is for."""

    ingest = "ingest"
    read = "read"
    admin = "admin"


def serve(
    host: Annotated[str, typer.Option(help="Address to listen at; beyond this machine only with a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8321,
    where: Where = None,
    older_than: Annotated[
        str | None, typer.Option("--prune-older-than", help="Let go of traces that nothing was added to for 30d, say.")
    ] = None,
    larger_than: Annotated[
        str | None, typer.Option("--prune-larger-than", help="Let go of the oldest when the store has 10GB, say.")
    ] = None,
) -> None:
    """Take traces by OTLP over HTTP, keep them, and answer questions about them.

    Point any OpenTelemetry exporter at it:
    OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:8321

    Secrets are left out of what is stored: what looks like one, and the values
    of this project's settings and of variables called …_KEY, …_TOKEN, …_SECRET
    and …_PASSWORD.
    """
    from agentloop.config import known_secrets

    try:
        import uvicorn

        from agentloop.api.app import make_app
    except ImportError as error:
        raise ConfigError(f"{error}; the service needs an extra: {extra('serve')}") from error
    limits = Limits(older_than, larger_than)
    store = open_store(where, secrets=known_secrets(Path()))
    try:
        if host not in LOOPBACK and not store.n_keys():
            raise ConfigError(
                f"--host {host} can be reached from other machines and there is no key; "
                "make one with `agentloop keys add PROJECT`, or leave --host out"
            )
        config = uvicorn.Config(
            make_app(store), host, port, log_level="warning", access_log=False, timeout_graceful_shutdown=ENDING_S
        )
        with _listening(host, port) as listening:
            at = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
            stderr.print(f"traces: {at}/v1/traces (OTLP)  questions: {at}/docs  Ctrl-C ends it", markup=False)
            with pruning(store, limits):
                uvicorn.Server(config).run(sockets=[listening])
    finally:
        store.close()


def _listening(host: str, port: int) -> socket.socket:
    """Raises ConfigError when nobody can listen there."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {host}:{port}: {error.strerror}; choose another --host or --port"
        ) from None


@keys.command()
def add(
    project: Annotated[str, typer.Argument(help="The project (tenant) whose traces the key leads to.")],
    scope: Annotated[
        list[Scope] | None, typer.Option(help="May be given more than once; default: ingest, read.")
    ] = None,
    where: Where = None,
    as_json: AsJson = False,
) -> None:
    """Make a key. It is shown once: only its hash is kept."""
    from agentloop.api.auth import new_key

    words, key = new_key(project, [each.value for each in scope or (Scope.ingest, Scope.read)])
    store = open_store(where)
    try:
        store.put_key(key)
    finally:
        store.close()
    if as_json:
        print_json({"id": key.id, "project": key.project, "scopes": list(key.scopes), "key": words})
    else:
        stdout.print(words, markup=False, soft_wrap=True)


@keys.command("ls")
def list_keys(where: Where = None, as_json: AsJson = False) -> None:
    """List keys by id."""
    store = open_store(where, create=False)
    found = store.keys()
    store.close()
    if as_json:
        print_json({"keys": [{"id": k.id, "project": k.project, "scopes": list(k.scopes)} for k in found]})
    elif not found:
        stdout.print("no keys; `agentloop keys add PROJECT` makes one")
    else:
        table = Table(box=None, pad_edge=False)
        for heading in ("id", "project", "scopes"):
            table.add_column(heading)
        for key in found:
            table.add_row(key.id, Text(key.project), ", ".join(key.scopes))
        stdout.print(table)


@keys.command()
def revoke(key_id: Annotated[str, typer.Argument(help="The id that `keys ls` shows.")], where: Where = None) -> None:
    """End a key; a running service refuses it within seconds."""
    store = open_store(where, create=False)
    try:
        if not store.revoke_key(key_id):
            raise ConfigError(f"no key {key_id!r}; `agentloop keys ls` shows them")
    finally:
        store.close()
