"""What a loop proved: its live version against the first one, and against the control arm."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from pydantic import Field

from agentloop.gate.success import Success, difference_ci95, paired_differences, success
from agentloop.store.store import Store
from agentloop.types import Action, Frozen, StageKind
from agentloop.views.turns import Turns
from agentloop.views.versions import Versions

CONTROL = 0
"""Where the report of the control arm is stored; versions count from 1."""


class Control(Frozen):
    """The first version's model, taught only by the demonstrations that passed: what filtering gives without a loop."""

    success: Success
    """On the held-out split."""
    n_demonstrations: int
    """Demonstrations that passed."""
    n_steps: int
    """Gradient steps, as many as the first version's."""
    failures: dict[str, int] = Field(default_factory=dict)
    """Critical failure type -> episodes of the held-out split."""
    ahead: float
    """Success of the live version minus this one's, in [-1, 1]."""
    ahead_ci95: tuple[float, float]

    def document(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "success": round(self.success.mean, 4),
            "ci95": [round(edge, 4) for edge in self.success.ci95],
            "demonstrations": self.n_demonstrations,
            "steps": self.n_steps,
            "failures": self.failures,
            "ahead": round(self.ahead, 4),
            "ahead_ci95": [round(edge, 4) for edge in self.ahead_ci95],
        }


def final_decision(versions: Versions) -> Action | None:
    """Promote where any version took the first one's place, else the newest version's; None without a decision."""
    if versions.live.number != versions.first.number:
        return Action.promote
    actions = [versions.decisions[v.number].action for v in versions.all if v.number in versions.decisions]
    return next(reversed(actions), None)


def control_arm(store: Store, versions: Versions, turns: Turns, suite_hash: str) -> Control | None:
    """The control arm beside the live version; None where it was not run."""
    report = store.report(suite_hash, CONTROL)
    stage = turns.stage(StageKind.control, CONTROL, suite_hash)
    if report is None or stage is None:
        return None
    lead = list(paired_differences(report, versions.reports[versions.live.number]).values())
    return Control(
        success=success(report),
        n_demonstrations=int(stage.metrics["n_demonstrations"]),
        n_steps=int(stage.metrics["steps"]),
        failures=report.failures,
        ahead=fmean(lead),
        ahead_ci95=difference_ci95(lead),
    )
