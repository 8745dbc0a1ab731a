"""Names of figures: their order.."""

from __future__ import annotations

from agentloop.train.figures import EXCLUDED, SECONDS, StepPhase, counts, in_order, of


def test_names_come_as_they_are_shown() -> None:
    names = ["x/own", "seconds/train", "lag", "seconds/generate", "clip/negative", "clip/positive", "reward/exact"]
    assert in_order([*names, "reward", "reward"]) == [
        "reward", "reward/exact", "clip/positive", "clip/negative", "lag", "seconds/generate", "seconds/train", "x/own",
    ]  # fmt: skip


def test_members_of_a_family() -> None:
    assert of(SECONDS, StepPhase.judge) == "seconds/judge"
    assert counts(EXCLUDED, {"infra_failed": 2}) == {"excluded/infra_failed": 2.0}
