"""`agentloop loop` where workers drive the loop: asks for it, and shows how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentloop_cli.render import LiveProgress, print_json, stderr
from agentloop_cli.stores import same_project

if TYPE_CHECKING:
    from agentloop.protocols import SandboxBackend


def is_driven(folder: Path, where: str | None) -> bool:
    """Whether the settings leave the loop of the project in `folder` to workers."""
    from agentloop.config.settings import load_config

    work = load_config(folder).work
    return work.shared and not work.takes_part and where is None


def follow_project(
    folder: Path, backend: SandboxBackend, command: str, *, as_json: bool, settings: Mapping[str, dict[str, Any]]
) -> bool:
    """Follow the project's loop to its end, and print its summary. False, having said why, if no worker can drive it.

    Ctrl-C ends following, and not the run.
    """
    from agentloop.loop.following import follow_loop
    from agentloop_cli.run import show_loop

    try:
        with LiveProgress() as progress:
            end = follow_loop(folder, backend, progress, command=command, settings=settings)
    except KeyboardInterrupt:
        cancel = f"agentloop queue cancel loop{same_project(folder)}"
        stderr.print(f"the loop goes on without this command; `{cancel}` ends it", markup=False)
        raise
    if end is None:
        return False
    document, report = end
    if as_json:
        print_json(document)
    else:
        show_loop(folder, document, report)
    return True
