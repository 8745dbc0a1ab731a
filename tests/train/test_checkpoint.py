"""Versions on disk: whole or not there, told apart by every byte, and a place to go on from exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentloop.policies.chat import train_tokenizer
from agentloop.policies.tiny import TinyPolicy
from agentloop.registry import folders
from agentloop.registry.artifacts import WEIGHTS, weights_hash
from agentloop.train.checkpoint import load_trainer, read_progress, save_progress, save_version
from agentloop.train.grpo import Grpo
from agentloop.types import Sample

from .rows import near_policy, rows_of, same, small_model, weights


def policy(seed: int = 3) -> TinyPolicy:
    tokenizer = train_tokenizer(["to add, sum and take away"])
    return TinyPolicy.of(small_model(seed, n_vocab=tokenizer.get_vocab_size()), tokenizer)


def turns(made: TinyPolicy) -> list[list[Sample]]:
    return [near_policy(made.model, rows_of([5, 8, 6], seed=seed)) for seed in range(4)]


def test_training_goes_on_from_a_version_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    straight, cut = policy(), policy()
    batches = turns(straight)
    trainer = Grpo(straight.model, straight.chat.pad)
    for batch in batches:
        trainer.step(batch)

    trainer = Grpo(cut.model, cut.chat.pad)
    for batch in batches[:2]:
        trainer.step(batch)
    halfway = weights(cut.model)
    save_version(tmp_path / "v1", cut, trainer.optimizer, {"sums": 0.25})
    again = TinyPolicy(tmp_path / "v1" / WEIGHTS)
    assert same(halfway, weights(again.model))
    trainer = Grpo(again.model, again.chat.pad)
    assert load_trainer(tmp_path / "v1", trainer.optimizer) == {"sums": 0.25}
    for batch in batches[2:]:
        trainer.step(batch)

    assert not same(halfway, weights(again.model))
    assert same(weights(straight.model), weights(again.model))


def test_without_moments_training_starts_afresh(tmp_path: Path) -> None:
    made = policy()
    save_version(tmp_path / "v1", made, None, {})
    trainer = Grpo(made.model, made.chat.pad)
    assert load_trainer(tmp_path / "v1", trainer.optimizer) == {}
    assert trainer.optimizer.state_dict()["state"] == {}


def test_equal_weights_have_equal_hashes_and_others_have_not(tmp_path: Path) -> None:
    def saved(name: str, made: TinyPolicy, rate: float) -> str:
        save_version(tmp_path / name, made, None, {"sums": rate})
        return weights_hash(tmp_path / name / WEIGHTS)

    first = saved("a", policy(), 0.1)
    assert saved("b", policy(), 0.9) == first
    other = policy()
    with torch.no_grad():
        other.model.lm_head.weight[0, 0] += 1e-3
    assert saved("c", other, 0.1) != first


def test_progress_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    for left in (tmp_path / ".at.draft", tmp_path / "at"):
        left.mkdir()
        (left / "junk").write_text("from an interrupted run")
    made = policy()
    save_progress(tmp_path / "at", made.model, Grpo(made.model, made.chat.pad).optimizer, {"n": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["at"]
    assert not (tmp_path / "at" / "junk").exists()


def test_a_crash_while_writing_leaves_the_progress_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = policy()
    optimizer = Grpo(made.model, made.chat.pad).optimizer
    save_progress(tmp_path / "at", made.model, optimizer, {"n": 1})

    def crash(path: Path) -> None:
        raise OSError("disk full")

    # A full disk cannot be had cheaply; the flush is the last thing before the rename.
    monkeypatch.setattr(folders, "_flush", crash)
    with pytest.raises(OSError, match="disk full"):
        save_progress(tmp_path / "at", made.model, optimizer, {"n": 2})
    assert read_progress(tmp_path / "at") == {"n": 1}
