"""Supervised steps: the weighted mean by formula, the warm-up, and progress on one batch."""

from __future__ import annotations

import math

import pytest
import torch

from agentloop.train.sft import Sft, sft_loss

from .rows import PAD, plain_logprobs, rows_of, same, small_model, weights


@pytest.mark.parametrize("context_weight", [0.0, 0.1, 1.0])
def test_loss_is_the_weighted_mean_over_tokens(context_weight: float) -> None:
    model, samples = small_model(), rows_of([4, 9, 6])
    total = weight = 0.0
    actions = []
    for s in samples:
        for logprob, action in zip(plain_logprobs(model, s.token_ids), s.action_mask[1:], strict=True):
            w = 1.0 if action else context_weight
            total, weight = total - w * logprob, weight + w
            actions += [-logprob] if action else []
    loss, action_nll = sft_loss(model, samples, PAD, context_weight)
    assert loss.item() == pytest.approx(total / weight, rel=1e-5)
    assert action_nll == pytest.approx(sum(actions) / len(actions), rel=1e-5)


def test_loss_falls_on_one_batch() -> None:
    model, samples = small_model(), rows_of([4, 9, 6])
    trainer = Sft(model, PAD, warmup_steps=1)
    losses = [trainer.step(samples)["loss"] for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]


def test_the_rate_rises_and_then_stays_and_can_be_scaled() -> None:
    trainer = Sft(small_model(), PAD, learning_rate=1e-3, warmup_steps=4)
    rates = []
    for scale in (1.0, 1.0, 1.0, 1.0, 1.0, 0.5):
        trainer.step(rows_of([4]), rate=scale)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 0.5e-3])


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted() -> None:
    model = small_model()
    trainer = Sft(model, PAD)
    trainer.step(rows_of([4]))
    with torch.no_grad():
        model.model.norm.weight[0] = math.inf
    before = weights(model)
    metrics = trainer.step(rows_of([4]))
    assert metrics["skipped_steps"] == 1.0
    assert math.isnan(metrics["grad_norm"])
    assert same(before, weights(model))
