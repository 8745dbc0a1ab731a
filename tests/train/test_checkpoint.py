"""Versions on disk: whole or not there, told apart by every byte, and a place to go on from exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentloop.policies.chat import train_tokenizer
from agentloop.policies.tiny import TinyPolicy
from agentloop.registry.artifacts import WEIGHTS, folder_hash
from agentloop.train import checkpoint
from agentloop.train.checkpoint import ACTING, TRAINER, load_trainer, save_version
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
    first = save_version(tmp_path / "a", policy(), None, {"sums": 0.1})
    assert first == folder_hash(tmp_path / "a" / WEIGHTS)
    assert save_version(tmp_path / "b", policy(), None, {"sums": 0.9}) == first
    other = policy()
    with torch.no_grad():
        other.model.lm_head.weight[0, 0] += 1e-3
    assert save_version(tmp_path / "c", other, None, {}) != first


def test_a_draft_and_a_version_that_were_left_behind_are_replaced(tmp_path: Path) -> None:
    for left in (tmp_path / ".v1.draft", tmp_path / "v1"):
        (left / WEIGHTS).mkdir(parents=True)
        (left / WEIGHTS / "junk").write_text("from an interrupted run")
    sha256 = save_version(tmp_path / "v1", policy(), None, {})
    assert sha256 == save_version(tmp_path / "v2", policy(), None, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v1", "v2"]
    assert sorted(path.name for path in (tmp_path / "v1").iterdir()) == [ACTING, TRAINER, WEIGHTS]
    assert not (tmp_path / "v1" / WEIGHTS / "junk").exists()


def test_a_crash_while_writing_leaves_the_version_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = save_version(tmp_path / "v1", policy(3), None, {})

    def crash(path: Path) -> None:
        raise OSError("disk full")

    # A full disk cannot be had cheaply; the flush is the last thing before the rename.
    monkeypatch.setattr(checkpoint, "_flush", crash)
    with pytest.raises(OSError, match="disk full"):
        save_version(tmp_path / "v1", policy(4), None, {})
    assert folder_hash(tmp_path / "v1" / WEIGHTS) == sha256


def test_the_hash_sees_bytes_names_and_where_one_file_ends(tmp_path: Path) -> None:
    def made(name: str, **files: str) -> str:
        for file, text in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return folder_hash(tmp_path / name)

    base = made("base", a="one", b="two")
    assert made("copy", b="two", a="one") == base
    assert made("byte", a="onE", b="two") != base
    assert made("name", a="one", c="two") != base
    assert made("more", a="one", b="two", c="") != base
    assert made("ends", a="onet", b="wo") != base
    assert made("joined", a="onebtwo") != base
    nested = made("nested", **{"a": "one", "under/b": "two"})
    assert nested != base
