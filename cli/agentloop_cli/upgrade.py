"""`agentloop upgrade`: bring a project of an earlier layout to the present one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentloop_cli.render import AsJson, print_json, stdout


def upgrade(folder: Annotated[Path, typer.Argument(help="Project folder.")] = Path(), as_json: AsJson = False) -> None:
    """Copy versions, the fitted scorer and the reader's answers to .agentloop/; the originals stay."""
    from agentloop.config.layout import upgrade as copy_state

    copies = copy_state(folder)
    if as_json:
        print_json({"copied": [{"from": str(original), "to": str(copy)} for original, copy in copies]})
        return
    for original, copy in copies:
        stdout.print(f"{original} -> {copy}", markup=False, soft_wrap=True)
    end = "The originals are unchanged; remove them when nothing needs them." if copies else "Nothing to copy."
    stdout.print(end)
