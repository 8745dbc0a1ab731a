"""The must-pass cases in a project's folder, as the page of failures needs them."""

from __future__ import annotations

from pathlib import Path

from agentloop.errors import ConfigError
from agentloop.mining.case import REGRESSIONS, read_case
from agentloop.suites.names import CASE
from agentloop.views.failure_overview import CaseOrigin


def case_origins(folder: Path | None) -> list[CaseOrigin]:
    """The cases in `folder`, by name. Leaves out broken ones, which `agentloop gate` refuses with their place."""
    if folder is None:
        return []
    origins = []
    for path in sorted((folder / REGRESSIONS).glob(f"*/{CASE}")):
        try:
            case = read_case(path.parent)
        except ConfigError:
            continue
        detector = case.detector.partition("@")[0]
        origins.append(
            CaseOrigin(id=case.id, trace=case.trace, failure=case.failure.value, detector=detector, tool=case.tool)
        )
    return origins
