"""`agentloop serve` and `agentloop keys`: the trace service with the gateway, and who may use it."""

from __future__ import annotations

import socket
from enum import StrEnum
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer
from rich.table import Table
from rich.text import Text

from agentloop.errors import ConfigError, extra
from agentloop_cli.prune import Limits, pruning
from agentloop_cli.render import AsJson, print_json, stderr, stdout
from agentloop_cli.stores import Where, open_store

if TYPE_CHECKING:
    from agentloop.gateway.prices import Price
    from agentloop.gateway.routes import Routes
    from agentloop.store.store import Store

keys = typer.Typer(help="Keys of the trace service.", no_args_is_help=True)
LOOPBACK = {"127.0.0.1", "::1", "localhost"}


MaxCalls = Annotated[int | None, typer.Option("--max-calls", min=0, help="Calls of models in all.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", min=0, help="Tokens of prompts and answers in all.")]
MaxUsd = Annotated[float | None, typer.Option("--max-usd", min=0, help="Money in all, where prices are known.")]
PerMinute = Annotated[int | None, typer.Option("--calls-per-minute", min=0, help="Calls of models within a minute.")]


class Scope(StrEnum):
    """What a key is for."""

    ingest = "ingest"
    judge = "judge"
    read = "read"
    call = "call"
    admin = "admin"


def serve(
    host: Annotated[str, typer.Option(help="Address to listen at; beyond this machine only with a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8321,
    where: Where = None,
    upstream: Annotated[
        list[str] | None,
        typer.Option(help="Serve the models of this OpenAI-compatible endpoint, http://127.0.0.1:8000/v1, say."),
    ] = None,
    only_models: Annotated[bool, typer.Option(help="The gateway alone: take no spans, answer no questions.")] = False,
    older_than: Annotated[
        str | None, typer.Option("--prune-older-than", help="Let go of traces that nothing was added to for 30d, say.")
    ] = None,
    larger_than: Annotated[
        str | None, typer.Option("--prune-larger-than", help="Let go of the oldest when the store has 10GB, say.")
    ] = None,
) -> None:
    """Take traces by OTLP over HTTP, or as a gateway to models; answer questions.

    Point any OpenTelemetry exporter at it:
    OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:8321

    With --upstream, or tables `gateway.upstream` in agentloop.toml, it is a
    gateway to models, too: an agent whose base URL is http://127.0.0.1:8321/v1
    (OpenAI's SDK; without /v1 for Anthropic's) leaves a trace of every call.

    Secrets are left out of what is stored: what looks like one, and the values
    of this project's settings and of variables called …_KEY, …_TOKEN, …_SECRET
    and …_PASSWORD.
    """
    from agentloop.config.settings import known_secrets

    project = Path()
    try:
        from agentloop.api.app import make_app
        from agentloop.api.ending import Server
    except ImportError as error:
        raise ConfigError(f"{error}; the service needs an extra: {extra('serve')}") from error
    limits = Limits(older_than, larger_than)
    store = open_store(where, secrets=known_secrets(project))
    try:
        routes = _routes(project, store, upstream or [])
        if only_models and routes is None:
            raise ConfigError("--only-models needs an --upstream, or [[gateway.upstream]] in agentloop.toml")
        if host not in LOOPBACK and not store.n_keys():
            raise ConfigError(
                f"--host {host} can be reached from other machines and there is no key; "
                "make one with `agentloop keys add PROJECT`, or leave --host out"
            )
        app = make_app(store, routes, _price(project, routes), only_models=only_models)
        server = Server(app, host, port, lambda line: stderr.print(line, markup=False, soft_wrap=True))
        with _listening(host, port) as listening:
            at = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
            models = f"models: {at}/v1 and {at}/e/EPISODE/v1  " if routes else ""
            traces = "" if only_models else f"traces: {at}/v1/traces (OTLP)  questions: {at}/docs  "
            stderr.print(f"{models}{traces}Ctrl-C ends it", markup=False)
            with pruning(store, limits):
                if routes:
                    Thread(target=_warn, args=(routes,), daemon=True).start()
                server.run(sockets=[listening])
    finally:
        store.close()


def _routes(project: Path, store: Store, urls: list[str]) -> Routes | None:
    """What the settings and the command line say of models; None for no gateway."""
    from agentloop.config.sections import GatewaySection, from_environment
    from agentloop.config.settings import CONFIG_FILE, load_config
    from agentloop.gateway.routes import Routes, Upstream
    from agentloop.registry.versions import Registry, versions_of

    settings = load_config(project).gateway if (project / CONFIG_FILE).exists() else GatewaySection()
    upstreams = [Upstream(_host_of(url), url.rstrip("/")) for url in urls]
    for each in settings.upstream:
        given = each.model_dump(exclude={"api_key", "base_url", "dialects"})
        upstreams.append(
            Upstream(
                **given,
                base_url=each.base_url.rstrip("/"),
                api_key=from_environment(each.api_key) or None,
                dialects=frozenset(each.dialects),
            )
        )

    if not upstreams:
        return None
    aliases = {alias.name: alias.to for alias in settings.alias}
    return Routes(upstreams, aliases, versions_of(Registry(store)))


def _host_of(url: str) -> str:
    """What an upstream without a name is called. Raises ConfigError for a URL that cannot be parsed."""
    try:
        return urlsplit(url).netloc.rpartition("@")[2] or url
    except ValueError as error:
        raise ConfigError(f"--upstream {url!r} is not a URL ({error}); write http://HOST:PORT/v1") from None


def _warn(routes: Routes) -> None:
    """Of upstreams that cannot be asked now. They may be starting, so it stops nobody."""
    import asyncio

    from agentloop.gateway.offered import problems

    for name, problem in asyncio.run(problems(routes)).items():
        line = f"warning: upstream {name!r} {problem}; calls of its models fail until it answers"
        stderr.print(line, markup=False, soft_wrap=True)


def _price(project: Path, routes: Routes | None) -> Price:
    """`[[prices]]` of the settings, and litellm's list where calls go through litellm anyway: it takes 200 MB."""
    from agentloop.config.settings import load_prices
    from agentloop.costs.totals import price
    from agentloop.gateway.prices import by_usage
    from agentloop.policies.litellm import list_price, load_litellm

    own = load_prices(project)
    listed = routes is not None and any(upstream.via == "litellm" for upstream in routes.upstreams)
    if listed:
        load_litellm()  # takes seconds, and says what is missing before anybody is served
    return by_usage(price(own, list_price) if listed else price(own))


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
        list[Scope] | None,
        typer.Option(
            help="ingest: send spans. judge: say what traces are worth. read. call: models. admin: everything. "
            "You may give it more than once; default: ingest, read."
        ),
    ] = None,
    calls: MaxCalls = None,
    tokens: MaxTokens = None,
    usd: MaxUsd = None,
    per_minute: PerMinute = None,
    where: Where = None,
    as_json: AsJson = False,
) -> None:
    """Make a key. It is shown once: only its hash is kept."""
    from agentloop.api.auth import new_key
    from agentloop.store.keys import Budget

    words, key = new_key(project, [each.value for each in scope or (Scope.ingest, Scope.read)])
    key = key._replace(budget=Budget(calls, tokens, usd, per_minute))
    store = open_store(where)
    try:
        store.put_key(key)
    finally:
        store.close()
    if as_json:
        print_json({"id": key.id, "project": key.project, "scopes": list(key.scopes), "key": words})
    else:
        stdout.print(words, markup=False, soft_wrap=True)


@keys.command()
def budget(
    key_id: Annotated[str, typer.Argument(help="The id that `keys ls` shows.")],
    calls: MaxCalls = None,
    tokens: MaxTokens = None,
    usd: MaxUsd = None,
    per_minute: PerMinute = None,
    where: Where = None,
) -> None:
    """Let a key spend so much on models; bounds that are left out stay as they are."""
    from agentloop.store.keys import Budget

    given = Budget(calls, tokens, usd, per_minute)
    if given == Budget():
        raise ConfigError("name a bound: --max-calls, --max-tokens, --max-usd or --calls-per-minute")
    store = open_store(where, create=False)
    try:
        key = store.key(key_id)
        if key is None:
            raise ConfigError(f"no key {key_id!r}; `agentloop keys ls` shows them")
        more = {name: bound for name, bound in given._asdict().items() if bound is not None}
        store.set_budget(key_id, key.budget._replace(**more))
    finally:
        store.close()


@keys.command("ls")
def list_keys(where: Where = None, as_json: AsJson = False) -> None:
    """List keys by id."""
    store = open_store(where, create=False)
    found = store.keys()
    store.close()
    if as_json:
        shown = [
            {
                "id": key.id,
                "project": key.project,
                "scopes": list(key.scopes),
                "budget": key.budget._asdict(),
                "spent": key.spent._asdict(),
            }
            for key in found
        ]
        print_json({"keys": shown})
    elif not found:
        stdout.print("no keys; `agentloop keys add PROJECT` makes one")
    else:
        table = Table(box=None, pad_edge=False)
        for heading in ("id", "project", "scopes", "calls", "tokens", "USD", "a minute"):
            table.add_column(heading)
        for key in found:
            *totals, per_minute = key.budget
            spent = (
                f"{used:,.4g}{'' if bound is None else f' of {bound:,.4g}'}"
                for used, bound in zip(key.spent, totals, strict=True)
            )
            paced = "" if per_minute is None else f"{per_minute:,}"
            table.add_row(key.id, Text(key.project), ", ".join(key.scopes), *spent, paced)
        stdout.print(table)


@keys.command()
def revoke(key_id: Annotated[str, typer.Argument(help="The id that `keys ls` shows.")], where: Where = None) -> None:
    """End a key; a running service refuses it within seconds."""
    store = open_store(where, create=False)
    try:
        if not store.revoke_key(key_id):
            raise ConfigError(f"no key {key_id!r}; `agentloop keys ls` shows them")
        n_left = store.n_keys()
    finally:
        store.close()
    if not n_left:
        stderr.print("no key is left; the service stays closed until `agentloop keys add` makes one")


@keys.command("rotate-local")
def rotate_local(where: Where = None) -> None:
    """Make a new local token, with which you judge without a key.

    The token is in a file beside the store that only you can read. Use it as
    a key: curl -H "Authorization: Bearer $(cat traces/store.token)" …
    A running service takes it at once, and no longer the old one.
    """
    from agentloop.api.local import rotate, token_file

    store = open_store(where)
    store.close()
    if store.path is None:
        raise ConfigError("a store on a server has no local token; use `agentloop keys add PROJECT --scope judge`")
    rotate(token_file(store.path))
    stderr.print(f"new token in {token_file(store.path)}", markup=False, soft_wrap=True)
