"""An audit of folders: suites of our own, projects, and Harbor tasks, one after the other."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agentloop.audit import harbor, suite
from agentloop.audit.cheats import N_ORACLE, Quick, TaskAudit, document, quick_document
from agentloop.config.settings import CONFIG_FILE, load_config, suite_folder
from agentloop.harbor.roots import for_backend
from agentloop.harbor.task import find_tasks
from agentloop.judge.checks import check_verifiers
from agentloop.protocols import SandboxBackend
from agentloop.suites.names import HEAD
from agentloop.suites.suite import load_suite


class AuditDisplay(Protocol):
    """What an audit reports while it runs."""

    def start(self, stage: str, total: int) -> None:
        """A stage of `total` attempts begins."""
        ...

    def running(self, what: str) -> None:
        """An attempt has begun."""
        ...

    def advance(self) -> None:
        """An attempt has ended."""
        ...


@dataclass(frozen=True)
class AuditOptions:
    """How hard to try."""

    n_oracle: int = N_ORACLE
    """Attempts with each task's own solution."""
    n_concurrent: int = 2
    quick: bool = False
    """Try each solution once, and no cheat."""


def audit_folders(
    paths: Sequence[Path], backend: SandboxBackend, options: AuditOptions, display: AuditDisplay
) -> dict[str, Any]:
    """The document of `--json`. paths: folders of suites, of projects, or of Harbor tasks."""
    folders = [_suite_of(path) for path in paths]
    suites = [path for path in folders if (path / HEAD).is_file()]
    others = [path for path in folders if path not in suites]
    audits = _audit_suites(suites, backend, options, display) if suites else []
    audits += _audit_harbor(others, backend, options, display) if others else []
    if options.quick:
        return quick_document([Quick.of(one) for one in audits], backend.name)
    return document(audits, backend.name)


def _suite_of(path: Path) -> Path:
    """The suite of a project, or the path as it is."""
    return suite_folder(path, load_config(path)) if (path / CONFIG_FILE).is_file() else path


def _audit_suites(
    folders: Sequence[Path], backend: SandboxBackend, options: AuditOptions, display: AuditDisplay
) -> list[TaskAudit]:
    suites = [load_suite(folder) for folder in folders]
    for one in suites:
        check_verifiers(one)
    tasks = [task for one in suites for task in one.tasks]
    display.start(f"audit: {len(tasks)} tasks", len(tasks))
    return asyncio.run(
        suite.audit(
            tasks,
            backend,
            n_oracle=1 if options.quick else options.n_oracle,
            n_concurrent=options.n_concurrent,
            quick=options.quick,
            on_start=display.running,
            on_done=display.advance,
        )
    )


def _audit_harbor(
    paths: Sequence[Path], backend: SandboxBackend, options: AuditOptions, display: AuditDisplay
) -> list[TaskAudit]:
    tasks = find_tasks(list(paths))
    trying = harbor.quick_agents() if options.quick else harbor.agents(options.n_oracle)
    with tempfile.TemporaryDirectory() as folder:
        tasks = for_backend(tasks, backend, Path(folder))
        display.start(f"audit: {len(trying)} attempts at each of {len(tasks)} tasks", len(trying) * len(tasks))
        return asyncio.run(
            harbor.audit(
                tasks,
                backend,
                trying=trying,
                n_concurrent=options.n_concurrent,
                on_start=display.running,
                on_done=display.advance,
            )
        )
