"""Names of figures: their order, and the effective sample share by hand."""

from __future__ import annotations

import math

import pytest

from agentloop.train.figures import EXCLUDED, SECONDS, StepPhase, counts, effective_share, in_order, of


def test_names_come_as_they_are_shown() -> None:
    names = ["x/own", "seconds/train", "lag", "seconds/generate", "clip/negative", "clip/positive", "reward/exact"]
    assert in_order([*names, "reward", "reward"]) == [
        "reward", "reward/exact", "clip/positive", "clip/negative", "lag", "seconds/generate", "seconds/train", "x/own",
    ]  # fmt: skip


def test_members_of_a_family() -> None:
    assert of(SECONDS, StepPhase.judge) == "seconds/judge"
    assert counts(EXCLUDED, {"infra_failed": 2}) == {"excluded/infra_failed": 2.0}


@pytest.mark.parametrize(
    ("weights", "share"), [([2.0, 2.0], 1.0), ([3.0, 0.0, 0.0], 1 / 3), ([1.0, 3.0], 0.8), ([1.0], 1.0)]
)
def test_effective_share(weights: list[float], share: float) -> None:
    assert effective_share(weights) == pytest.approx(share)


@pytest.mark.parametrize("weights", [[], [0.0], [math.nan]])
def test_effective_share_of_nothing(weights: list[float]) -> None:
    assert math.isnan(effective_share(weights))
