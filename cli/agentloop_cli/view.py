"""`agentloop view`: pages on a trace store, in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentloop.errors import ConfigError, extra
from agentloop_cli.render import stderr
from agentloop_cli.stores import ProjectFolder, Where, opened_store


def view(
    trace: Annotated[str, typer.Argument(help="Show this trace first: its id or the beginning of it.")] = "",
    project: ProjectFolder = Path(),
    where: Where = None,
    browser: Annotated[bool, typer.Option(help="Open a browser; otherwise print the address.")] = True,
) -> None:
    """Look at traces, failures, versions and gates in a browser.

    The pages are read-only and only for you; you can look while a loop runs.
    """
    try:
        from agentloop.api.viewing import view as show
    except ImportError as error:
        raise ConfigError(f"{error}; the pages need an extra: {extra('serve')}") from error
    with opened_store(where, project=project) as store:
        target = f"/traces/{store.named(trace).id}" if trace else "/"
        show(store, project, target, opens=browser, say=_say)


def _say(line: str) -> None:
    stderr.print(line, markup=False, soft_wrap=True)
