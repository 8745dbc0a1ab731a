"""When the tiny policy's turns end, and how that is said; that it learns is the business of `tests/demo`."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from agentloop.loop.learner import TinyLearner, stage_name
from agentloop.store.tables import StageRow
from agentloop.types import PolicyVersion

from .mini import Recorder, make_mini, opened, solves


@pytest.mark.parametrize(("n", "turns"), [(1, "1 turn"), (2, "2 turns")])
def test_the_end_of_the_turns_names_the_setting_and_its_value(tmp_path: Path, n: int, turns: str) -> None:
    folder = make_mini(tmp_path / "mini", extra=f"[train]\nmax_turns = {n}\nstop_at = 0.9\n")
    progress = Recorder()
    made = {"number": n + 1, "parent": n, "kind": "weights", "artifact": "a", "sha256": "0" * 64, "config_hash": "c"}
    version = PolicyVersion.model_validate({**made, "created_at": datetime.now(UTC)})
    with opened(folder, progress) as project:
        project.store.put_stage(StageRow(name=stage_name(version.number), metrics={"validation": 0.5}))
        assert asyncio.run(TinyLearner(project, solves(0)).next(version)) is None
    assert progress.said == [
        f"finished: {turns}, v{n + 1} solves 50% of the validation tasks; "
        f"for more, raise [train] max_turns (now {n}) and run the loop again"
    ]
