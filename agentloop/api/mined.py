"""The must-pass cases in a project's folder, as the page of failures needs them."""

from __future__ import annotations

from pathlib import Path

from agentloop.errors import ConfigError
from agentloop.mining.case import REGRESSIONS, read_case
from agentloop.suites.names import CASES
from agentloop.views.failure_overview import CaseOrigin


def case_folders(folder: Path | None) -> list[Path]:
    """The folders of the cases of the project in `folder`, by name; none without a project."""
    if folder is None:
        return []
    return sorted(path.parent for path in (folder / REGRESSIONS).glob(CASES))


def case_origins(folder: Path | None) -> list[CaseOrigin]:
    """The cases in `folder`, by name. Leaves out broken ones, which `agentloop gate` refuses with their place."""
    origins = []
    for place in case_folders(folder):
        try:
            case = read_case(place)
        except ConfigError:
            continue
        detector = case.detector.partition("@")[0]
        origins.append(
            CaseOrigin(id=case.id, trace=case.trace, failure=case.failure.value, detector=detector, tool=case.tool)
        )
    return origins
