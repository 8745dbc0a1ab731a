"""`agentloop`, started by its entry point in this process: the second of imports is spent once."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import typer

FOREIGN = ("AGENTLOOP_", "GITHUB_", "GITLAB_", "CI_", "DOCKER_", "OPENAI_", "ANTHROPIC_")
"""Variables that change what commands do: they are of the machine, not of the pin."""
NO_ENGINE = "unix:///nonexistent/docker.sock"


class Ended(NamedTuple):
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str


@cache
def entry_point() -> Callable[[], None]:
    """What the installed script `agentloop` calls."""
    (entry,) = entry_points(group="console_scripts", name="agentloop")
    main: Callable[[], None] = entry.load()
    return main


def typer_app() -> Any:
    """The typer app that the entry point runs."""
    from agentloop_cli.main import app

    return app


def command_tree(app: Any) -> Any:
    """The commands of a typer app."""
    return typer.main.get_command(app)


def run(folder: Path, *arguments: str | Path, environ: Mapping[str, str] | None = None) -> Ended:
    """`agentloop ARGUMENTS` in `folder`, without a container engine and without variables of this machine."""
    stdout, stderr = io.StringIO(), io.StringIO()
    argv = ["agentloop", *map(str, arguments)]
    with (
        clean_environment(environ or {}),
        chdir(folder),
        patch.object(sys, "argv", argv),
        redirect_stdout(stdout),
        redirect_stderr(stderr),
    ):
        try:
            entry_point()()
            code: Any = 0
        except SystemExit as stop:
            code = stop.code
    return Ended(int(code or 0), stdout.getvalue(), stderr.getvalue())


@contextmanager
def clean_environment(more: Mapping[str, str]) -> Iterator[None]:
    """`os.environ` as it is the same on every machine, with `more`."""
    ours = {"COLUMNS": "100", "DOCKER_HOST": NO_ENGINE, "NO_COLOR": "1", "TERM": "dumb", **more}
    rest = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    with patch.dict(os.environ, {**rest, **ours}, clear=True):
        yield
