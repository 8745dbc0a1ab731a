"""Audits folders one after the other: suites of either kind, and projects."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agentloop.audit.cheats import N_ORACLE, Quick, document, quick_document
from agentloop.audit.tasks import audit
from agentloop.config.settings import CONFIG_FILE, load_config, suite_folder
from agentloop.harbor.images import images_for
from agentloop.judge.checks import check_verifiers
from agentloop.protocols import SandboxBackend
from agentloop.suites.suite import load_suites


class AuditDisplay(Protocol):
    """Receives the progress of an audit."""

    def start(self, stage: str, total: int) -> None:
        """A stage with `total` attempts begins."""
        ...

    def running(self, what: str) -> None:
        """An attempt has begun."""
        ...

    def advance(self) -> None:
        """An attempt has ended."""
        ...


@dataclass(frozen=True)
class AuditOptions:
    """Options of an audit."""

    n_oracle: int = N_ORACLE
    """Number of attempts with each task's own solution."""
    n_concurrent: int = 2
    quick: bool = False
    """True tries each solution once, and no cheat."""


def audit_folders(
    paths: Sequence[Path], backend: SandboxBackend, options: AuditOptions, display: AuditDisplay
) -> dict[str, Any]:
    """The document of `--json`. paths: folders of suites, of projects, or of Harbor tasks."""
    suites = load_suites([_suite_of(path) for path in paths])
    for one in suites:
        check_verifiers(one)
    n_tasks = sum(len(one.tasks) for one in suites)
    display.start(f"audit: {n_tasks} tasks", n_tasks)
    with ExitStack() as images:
        tasks = [task for one in suites for task in images.enter_context(images_for(one.tasks, backend))]
        work = audit(
            tasks,
            backend,
            n_oracle=1 if options.quick else options.n_oracle,
            n_concurrent=options.n_concurrent,
            quick=options.quick,
            on_start=display.running,
            on_done=display.advance,
        )
        audits = asyncio.run(work)
    if options.quick:
        return quick_document([Quick.of(one) for one in audits], backend.name)
    return document(audits, backend.name)


def _suite_of(path: Path) -> Path:
    """The suite of a project, or the path itself."""
    return suite_folder(path, load_config(path)) if (path / CONFIG_FILE).is_file() else path
