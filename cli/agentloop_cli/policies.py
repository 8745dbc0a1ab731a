"""`agentloop policies ls|serve`: the versions of a project, and a vLLM server for one of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from agentloop.errors import ConfigError
from agentloop_cli.render import AsJson, format_optional, print_json, stderr, stdout
from agentloop_cli.stores import ProjectFolder

if TYPE_CHECKING:
    from agentloop.types import PolicyVersion

policies = typer.Typer(help="Policy versions, and a server for them.", no_args_is_help=True)


@policies.command()
def ls(project: ProjectFolder = Path(), as_json: AsJson = False) -> None:
    """List the policy versions of a project, oldest first."""
    from agentloop.registry.serving import project_versions

    versions = project_versions(project)
    if as_json:
        print_json({"versions": [version.model_dump(mode="json") for version in versions]})
    elif not versions:
        stdout.print("no versions; `agentloop loop` creates them")
    else:
        stdout.print(_table(versions))


def _table(versions: Sequence[PolicyVersion]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("version", "state", "parent", "kind", "artifact", "note"):
        table.add_column(heading, overflow="fold")
    for v in versions:
        parent = format_optional(v.parent, "v{}")
        table.add_row(f"v{v.number}", v.state, parent, v.kind, Text(v.artifact or ""), Text(v.note))
    return table


@policies.command()
def serve(
    ref: Annotated[
        str | None, typer.Argument(help="Folder of a model; or a version of the project: live, or its number.")
    ] = None,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[-- VLLM ARGUMENTS]", help="Arguments passed to vLLM.")
    ] = None,
    project: ProjectFolder = Path(),
    url: Annotated[str | None, typer.Option(help="Watch the server at this address instead of starting one.")] = None,
    lora: Annotated[list[str] | None, typer.Option(help="NAME=FOLDER of an adapter; may be repeated.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model in requests; default: policy-vN, or its folder.")
    ] = (None),
    host: Annotated[
        str, typer.Option(help="Address to listen on; anyone who can reach it may use the model and load adapters.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8000,
    log: Annotated[Path | None, typer.Option(help="Default: logs/vllm.log in the project's folder.")] = None,
) -> None:
    """Serve a model with vLLM, on a GPU or a CPU, and keep it up until Ctrl-C.

    vLLM runs in the Python that serving.python names. A server that dies or
    hangs is restarted with its adapters; after several quick deaths the command
    gives up. Arguments after `--` go to vLLM:

    agentloop policies serve live -- --enable-auto-tool-choice --tool-call-parser hermes
    """
    from agentloop.registry.serving import ServeOptions, serve_model, watch

    if url is None:
        serve_model(ServeOptions(ref, project, more or (), lora or (), name, host, port, log), _say)
    elif ref is not None or lora or more:
        raise ConfigError("--url starts no server: name a model to serve or --url, not both")
    else:
        watch(url, _say)


def _say(line: str) -> None:
    stderr.print(line, markup=False)
