"""The simulation extrapolates only what it reproduces, and its prices follow from its options."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import scale_plan
from scale_model import Costs


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Two workers with 100 episodes each, which last 10 s."""
    monkeypatch.setattr(scale_plan, "EPISODES_AT_ONCE", (200,))
    monkeypatch.setattr(sys, "argv", ["scale_sim.py", "--episode-s", "10", "--worker-slots", "100"])
    return scale_plan.parsed("")


def report(measured_per_s: float) -> dict[str, Any]:
    """Measurements where the simulation of four workers said 1,000 units a second."""
    return {
        "row_2_workers": {"differs_by": scale_plan.differs_by(500, 500)},
        "row_4_workers": {"differs_by": scale_plan.differs_by(1000, measured_per_s)},
        "trace": vars(Costs(0.2, 0.7, 0.9, 1.1, 0.8, 0.0, 1.0)),
        "connections_per_worker": 2.0,
        "leased_ms": 0.02,
    }


@pytest.mark.parametrize(("measured_per_s", "code"), [(860.0, 1), (880.0, 0), (1160.0, 0), (1190.0, 1)])
def test_a_simulation_that_is_off_by_more_than_15_percent_extrapolates_nothing(
    measured_per_s: float, code: int, options: argparse.Namespace
) -> None:
    facts = report(measured_per_s)
    assert scale_plan.conclude(facts, options) == code
    assert (facts["reproduces"], "extrapolated" in facts) == (code == 0, code == 0)


def test_a_plan_names_what_is_busiest_and_what_it_costs(options: argparse.Namespace) -> None:
    facts = report(1000.0)
    scale_plan.conclude(facts, options)
    one, several = facts["extrapolated"]
    assert (one["several_runs"], several["several_runs"], one["workers"]) == (False, True, 2)
    assert one["per_s"] == pytest.approx(200 / 10, rel=0.1)
    assert one["saturates_first"] == max(one["busy"], key=one["busy"].get)
    assert one["busy"]["connections to the database"] == pytest.approx(2 * 2 / 500)
    hours = 1e6 / one["per_s"] / 3600
    usd = {"workers": hours * 2 * 4 * 0.04, "database": hours * 8 * 0.04, "gateway": 10 * 0.0034 / 3600 * 1e6 * 0.04}
    assert one["usd_per_million"] == pytest.approx({**usd, "model": 3.0 * 1e6 / 20_000}, rel=0.02)
    assert several["busy"]["cores of the database"] > one["busy"]["cores of the database"]
