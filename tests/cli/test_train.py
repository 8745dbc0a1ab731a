"""`agentloop train`: which trainers there are."""

from __future__ import annotations

import json

from .conftest import Run


def test_kinds_are_the_installed_trainers(agentloop: Run) -> None:
    done = agentloop("train", "kinds", "--json")
    assert done.returncode == 0
    assert {"fixed", "gepa", "grpo"} <= set(json.loads(done.stdout)["kinds"])
