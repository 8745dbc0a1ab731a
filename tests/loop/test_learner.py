"""When the tiny policy's turns end, and how that is said; that it learns is the business of `tests/demo`."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from agentloop.errors import ConfigError
from agentloop.loop.learner import TinyTrainer, stage_of
from agentloop.loop.stage import Stage
from agentloop.loop.trainers import make_trainer
from agentloop.policies.chat import train_tokenizer
from agentloop.policies.tiny import TinyPolicy, new_model
from agentloop.store.bodies import unpack
from agentloop.store.tables import StageRow
from agentloop.train.checkpoint import save_version
from agentloop.types import PolicyState, PolicyVersion

from .mini import Recorder, make_mini, opened, solves


@pytest.mark.slow
@pytest.mark.parametrize(("n", "turns"), [(1, "1 turn"), (2, "2 turns")])
def test_the_end_of_the_turns_names_the_setting_and_its_value(tmp_path: Path, n: int, turns: str) -> None:
    folder = make_mini(tmp_path / "mini", extra=f"[train]\nmax_turns = {n}\nstop_at = 0.9\n")
    progress = Recorder()
    made = {"number": n + 1, "parent": n, "kind": "weights", "artifact": "a", "sha256": "0" * 64, "config_hash": "c"}
    version = PolicyVersion.model_validate({**made, "created_at": datetime.now(UTC)})
    with opened(folder, progress) as project:
        project.store.put_stage(StageRow(name=stage_of(version.number).name, metrics={"validation": 0.5}))
        assert asyncio.run(TinyTrainer(project, solves(0), "").next(version)) is None
    assert progress.said == [
        f"finished: {turns}, v{n + 1} solves 50% of the validation tasks; "
        f"for more, raise [train] max_turns (now {n}) and run the loop again"
    ]


def with_validation(folder: Path) -> Path:
    """The project with one of its tasks in the validation split."""
    tasks = folder / "evals" / "mini" / "tasks.jsonl"
    tasks.write_text(tasks.read_text().replace('"split": "train"', '"split": "validation"', 1))
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("bubblewrap")
def test_under_another_agent_the_same_weights_are_another_version(tmp_path: Path) -> None:
    folder = with_validation(make_mini(tmp_path / "mini", extra="[train]\nmax_turns = 1\n"))
    tokenizer = train_tokenizer(["What is in q1?", "cat q1"])
    policy = TinyPolicy.of(new_model(tokenizer.get_vocab_size(), seed=0), tokenizer)
    with opened(folder) as project:
        before = TinyTrainer(project, solves(0), "agent one")
        sha256 = save_version(project.version_folder(1), policy, None, {}, acting="agent one")
        stage = Stage(project, stage_of(1), metrics={"validation": 0.0})
        first = before._register(1, None, sha256, stage, "warm start")
        assert before.policy(first)
        after = TinyTrainer(project, solves(0), "agent two")

        async def turns() -> tuple[PolicyVersion | None, PolicyVersion | None]:
            try:
                made = await after.next(first)
                return made, made and await after.next(made)
            finally:
                await project.pool.close()

        second, third = asyncio.run(turns())
        assert second is not None
        assert (second.number, second.parent, second.sha256) == (2, 1, sha256)
        assert second.state is PolicyState.candidate, "the gate compares it with v1"
        assert "validation" in project.store.stages()[stage_of(2).name].metrics
        assert third is None, "its agent is the project's, and the turns are used up"
        with pytest.raises(ConfigError, match=r"v1 acted under other \[policy\] or \[agent\] settings"):
            after.policy(first)


@pytest.mark.slow
@pytest.mark.usefixtures("bubblewrap")
def test_an_interrupted_version_takes_no_attempts_of_an_agent_edited_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_validation(make_mini(tmp_path / "mini", extra="[train]\nmax_turns = 1\n"))
    tokenizer = train_tokenizer(["What is in q1?", "cat q1"])
    policy = TinyPolicy.of(new_model(tokenizer.get_vocab_size(), seed=0), tokenizer)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with opened(folder) as project:
        sha256 = save_version(project.version_folder(1), policy, None, {}, acting="agent one")
        stage = Stage(project, stage_of(1), metrics={"validation": 0.0})
        first = TinyTrainer(project, solves(0), "agent one")._register(1, None, sha256, stage, "warm start")

        async def turns() -> None:
            try:
                with monkeypatch.context() as patch:
                    patch.setattr(TinyTrainer, "_register", stop)
                    with pytest.raises(KeyboardInterrupt):
                        await TinyTrainer(project, solves(0), "agent two").next(first)
                await TinyTrainer(project, solves(0), "agent three").next(first)
            finally:
                await project.pool.close()

        asyncio.run(turns())
        bodies = [unpack(row.body)[0] for row in project.store.stage_traces(stage_of(2).name)]
        assert [trace.identity for trace in bodies] == ["agent three"] * 3


@pytest.mark.slow
def test_another_temperature_or_agent_is_another_version(tmp_path: Path) -> None:
    """As a gate sees it, whose identity of a version has both; the number of concurrent episodes is no part of it."""
    folder = with_validation(make_mini(tmp_path / "mini"))
    settings = (folder / "agentloop.toml").read_text()

    def acting(extra: str) -> str:
        (folder / "agentloop.toml").write_text(settings.replace('kind = "scripted"\n', f'kind = "tiny"\n{extra}'))
        with opened(folder) as project:
            learner = make_trainer(project)
            assert isinstance(learner, TinyTrainer)
            return learner.acting

    before = acting("")
    assert acting("max_concurrent = 3\n") == before
    assert acting("temperature = 1.0\n") == before, "the default"
    assert acting("temperature = 0.5\n") != before
    assert acting('[agent]\ntools = ["shell", "files"]\n') != before
