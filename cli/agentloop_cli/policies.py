"""`agentloop policies ls|serve`: the versions of a project, and a vLLM server for one of them."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from agentloop.errors import ConfigError, did_you_mean
from agentloop_cli.render import AsJson, print_json, stderr, stdout
from agentloop_cli.stores import ProjectFolder, open_store

if TYPE_CHECKING:
    from agentloop.config.sections import ServingSection
    from agentloop.types import PolicyVersion

policies = typer.Typer(help="Policy versions, and a server for them.", no_args_is_help=True)
MODEL, ADAPTER = "config.json", "adapter_config.json"
"""The file by which a folder is known to have a model, or an adapter of one."""
WEIGHTS, LOG = "weights", "vllm.log"


@policies.command()
def ls(project: ProjectFolder = Path(), as_json: AsJson = False) -> None:
    """List the policy versions of a project, oldest first."""
    found = _versions(project)
    if as_json:
        print_json({"versions": [version.model_dump(mode="json") for version in found]})
        return
    if not found:
        stdout.print("no versions; `agentloop loop` makes them")
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("version", "state", "parent", "kind", "artifact", "note"):
        table.add_column(heading, overflow="fold")
    for v in found:
        parent = "" if v.parent is None else f"v{v.parent}"
        table.add_row(f"v{v.number}", v.state, parent, v.kind, Text(v.artifact or ""), Text(v.note))
    stdout.print(table)


@policies.command()
def serve(
    ref: Annotated[
        str | None, typer.Argument(help="Folder of a model; or a version of the project: live, or its number.")
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(metavar="[-- VLLM ARGUMENTS]", help="Handed on.")] = None,
    project: ProjectFolder = Path(),
    url: Annotated[str | None, typer.Option(help="Start nothing: watch the server at this address.")] = None,
    lora: Annotated[list[str] | None, typer.Option(help="NAME=FOLDER of an adapter; may be given repeatedly.")] = None,
    name: Annotated[
        str | None, typer.Option(help="What requests call the model; default: policy-vN, or its folder.")
    ] = (None),
    host: Annotated[str, typer.Option(help="Whoever reaches it may use the model and load adapters.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    log: Annotated[Path | None, typer.Option(help="Default: logs/vllm.log in the project's folder.")] = None,
) -> None:
    """Serve a model with vLLM, on a GPU or a CPU, and keep it up until Ctrl-C.

    vLLM is taken from the Python that is set as serving.python. A server
    that dies or hangs is started again, with its adapters; one that dies
    quickly again and again is given up. What follows `--` goes to vLLM:

    agentloop policies serve live -- --enable-auto-tool-choice --tool-call-parser hermes
    """
    from agentloop.policies.engine import find_vllm, vllm_command
    from agentloop.policies.serving import Patience, Server, supervise

    if url is not None:
        if ref is not None or lora or more:
            raise ConfigError("--url starts nothing: leave out what is to be served, or leave out --url")
        _watch(url)
        return
    if ref is None:
        raise ConfigError("what is to be served? Name the folder of a model, or `live`, or a version's number")
    folder, called = _model(ref, project)
    adapters = dict(_adapter(given) for given in lora or ())
    settings = _settings(project)
    port = _free_port(host, port)
    vllm = find_vllm(settings.python)
    called = name or called
    stderr.print(f"vLLM {vllm.version} on {vllm.device} serves {called}: {folder}", markup=False)
    command, variables = vllm_command(vllm, folder, called, host=host, port=port, more=more or ())
    at = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    server = Server(command, at, log=log or project / "logs" / LOG, variables=variables)
    server.adapters |= adapters
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: whoever ends us ends the server, too
    supervise(server, _say, Patience(start_s=settings.start_timeout_s))


def _say(line: str) -> None:
    stderr.print(line, markup=False)


def _watch(url: str) -> None:
    """Tells when a server that is not ours comes and goes, until Ctrl-C."""
    from agentloop.policies.serving import Server

    at = url.rstrip("/").removesuffix("/v1")
    if not at.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url!r} must begin with http:// or https://")
    server, was = Server((), at, log=Path(LOG)), None
    while True:
        is_up = server.is_healthy()
        if is_up is not was:
            _say(f"{'ready' if is_up else 'no answer'}: {at}/v1")
        was = is_up
        time.sleep(2)


def _versions(project: Path) -> list[PolicyVersion]:
    from agentloop.registry.versions import Registry

    store = open_store(None, project=project, create=False)
    try:
        return Registry(store).all()
    finally:
        store.close()


def _model(ref: str, project: Path) -> tuple[Path, str]:
    """(folder of the model that `ref` means, what it is called)."""
    number = re.fullmatch(r"v?(\d+)", ref)
    if ref != "live" and not number:
        return _loadable(Path(ref), ref), Path(ref).resolve().name
    found = _versions(project)
    version = next((v for v in found if (v.number == int(number[1]) if number else v.state == "live")), None)
    if version is None:
        known = ", ".join(f"v{v.number}" for v in found) or "none"
        raise ConfigError(f"no version {ref!r} in {project} (there: {known}); `agentloop policies ls` lists them")
    if version.artifact is None:
        raise ConfigError(f"v{version.number} has no weights of ours ({version.kind}); serve the folder of a model")
    folder = project / version.artifact
    return _loadable(folder, ref), f"policy-v{version.number}"


def _loadable(folder: Path, ref: str) -> Path:
    """Where in `folder` the model is."""
    if place := _holding(folder, MODEL):
        return place
    if _holding(folder, ADAPTER):
        raise ConfigError(f"{folder} is an adapter; serve its base model with --lora NAME={folder}")
    if not folder.is_dir():
        raise ConfigError(
            f"no folder {folder}{did_you_mean(ref, ['live'])}; name one, or `live`, or a version's number"
        )
    raise ConfigError(f"{folder} has no {MODEL}; name the folder of a model in the Hugging Face layout")


def _adapter(given: str) -> tuple[str, Path]:
    name, is_there, folder = given.partition("=")
    if not (name and is_there and folder):
        raise ConfigError(f"--lora {given!r}: write NAME=FOLDER")
    if place := _holding(Path(folder), ADAPTER):
        return name, place
    if _holding(Path(folder), MODEL):
        raise ConfigError(
            f"--lora {given!r}: {folder} is a whole model and no adapter; "
            f"serve it by itself: `agentloop policies serve {folder} --name {name}`"
        )
    what = "is no folder" if not Path(folder).is_dir() else f"has no {ADAPTER}, nor has its folder {WEIGHTS}"
    raise ConfigError(f"--lora {given!r}: {folder} {what}; name the folder of an adapter")


def _holding(folder: Path, file: str) -> Path | None:
    """Where in a folder that file is; a version keeps its own in `weights`."""
    return next((place for place in (folder, folder / WEIGHTS) if (place / file).is_file()), None)


def _settings(project: Path) -> ServingSection:
    """Of the project; outside of one, the environment's."""
    from agentloop.config.settings import CONFIG_FILE, Config, load_config

    return (load_config(project) if (project / CONFIG_FILE).exists() else Config()).serving


def _free_port(host: str, port: int) -> int:
    """Raises ConfigError when nobody can listen there."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise ConfigError(f"cannot listen at {host}:{port}: {why}; choose another --port") from None
