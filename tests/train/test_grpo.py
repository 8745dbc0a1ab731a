"""The clipped objective, its gradients and its bookkeeping against formulas written out here."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from agentloop.errors import TrainingError
from agentloop.train import grpo, update
from agentloop.train.grpo import Grpo, GrpoSettings, clipped_objective
from agentloop.train.logprobs import make_batch
from agentloop.types import Sample

from .rows import (
    PAD,
    furthest,
    gradients,
    near_policy,
    on_policy,
    plain_logprobs,
    row,
    rows_of,
    same,
    small_model,
    weights,
)

NO_BONUS = GrpoSettings(learning_rate=0.0, entropy_weight=0.0)


@pytest.fixture
def unclipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave gradients as they are, so that their sizes can be compared, too."""
    monkeypatch.setattr(update, "MAX_GRAD_NORM", math.inf)


def updated(model: Qwen2ForCausalLM, rows: Sequence[Sample], settings: GrpoSettings = NO_BONUS) -> dict[str, Tensor]:
    """The gradients of one optimiser step on `rows`; `model` stays as it is."""
    trainer = Grpo(copy.deepcopy(model), PAD, settings)
    # The bonus rests on the entropy of the step before, so an optimiser that changes nothing goes first.
    trainer.optimizer.step = lambda: None  # type: ignore[assignment]
    trainer._update(rows, defaultdict(float))
    trainer._update(rows, defaultdict(float))
    return gradients(trainer.model)


def test_rows_of_different_temperatures_are_refused() -> None:
    warm, hot = rows_of([6, 6])
    trainer = Grpo(small_model(), PAD, NO_BONUS)
    with pytest.raises(TrainingError, match="different temperatures"):
        trainer.step([warm, hot.model_copy(update={"temperature": 0.5})])


# ------------------------------------------------------------------------------------- objective


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        # Inside the clip: r A, and d(r A)/d(log r) = r A.
        (1.0, 2.0, 2.0, 2.0),
        (1.2, 2.0, 2.4, 2.4),
        (0.9, -2.0, -1.8, -1.8),
        # A good action that has become likely enough, and a bad one that has become rare enough: no slope.
        (1.5, 2.0, 2.56, 0.0),
        (0.5, -2.0, -1.6, 0.0),
        # A good action that became rare, and a bad one that became likely, are still pushed.
        (0.5, 2.0, 1.0, 1.0),
        (1.5, -2.0, -3.0, -3.0),
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_objective_by_hand(ratio: float, advantage: float, objective: float, slope: float) -> None:
    behaviour = torch.tensor([-1.3])
    logprob = (behaviour + math.log(ratio)).requires_grad_()
    value, found = clipped_objective(logprob, behaviour, torch.tensor([advantage]), low=0.2, high=0.28)
    value.sum().backward()
    assert found.item() == pytest.approx(ratio, rel=1e-6)
    assert value.item() == pytest.approx(objective, rel=1e-6)
    assert logprob.grad is not None
    assert logprob.grad.item() == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("log_ratio", [-1e4, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_no_ratio_overflows(log_ratio: float, advantage: float) -> None:
    logprob = torch.tensor([log_ratio], requires_grad=True)
    value, _ = clipped_objective(logprob, torch.zeros(1), torch.tensor([advantage]), low=0.2, high=0.28)
    value.sum().backward()
    assert logprob.grad is not None
    assert math.isfinite(value.item())
    assert math.isfinite(logprob.grad.item())


# -------------------------------------------------------------------------------------- gradients


@pytest.mark.usefixtures("unclipped")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_on_policy_it_is_reinforce(temperature: float) -> None:
    model = small_model()
    rows = [on_policy(model, s) for s in rows_of([7, 4, 9], temperature=temperature)]
    reference = copy.deepcopy(model)
    n_tokens = sum(sum(s.action_mask) for s in rows)
    for s in rows:
        ids = torch.tensor([s.token_ids])
        logps = torch.log_softmax(reference(input_ids=ids).logits[0, :-1] / temperature, -1)
        chosen = logps[torch.arange(len(s.token_ids) - 1), ids[0, 1:]]
        loss = -(s.advantage * chosen * torch.tensor(s.action_mask[1:])).sum() / n_tokens
        loss.backward()
    assert furthest(gradients(reference), updated(model, rows)) < 1e-5


@pytest.mark.usefixtures("unclipped")
def test_what_is_masked_has_no_part_in_the_gradient() -> None:
    model = small_model()
    ids, mask = (3, 1, 4, 1, 5, 9), (0, 1, 0, 1, 1, 0)
    exact = on_policy(model, row(ids, (1,) * 6)).logprobs
    behaviour = tuple(lp * m for lp, m in zip(exact, mask, strict=True))
    base = updated(model, [row(ids, mask, logprobs=behaviour)])
    assert max(float(g.abs().max()) for g in base.values()) > 0.0
    others = [
        row(ids, mask, logprobs=[lp or -50.0 for lp in behaviour]),
        # The last token is context for none, so as a masked target it must not count at all.
        row((*ids[:-1], 2), mask, logprobs=behaviour),
    ]
    for other in others:
        assert same(base, updated(model, [other]))
    unmasked = row(ids, (*mask[:-1], 1), logprobs=(*behaviour[:-1], exact[-1]))
    assert furthest(base, updated(model, [unmasked])) > 1e-3


@pytest.mark.usefixtures("unclipped")
@pytest.mark.parametrize("floor", [0.0, 1e9], ids=["above the floor", "below the floor"])
def test_the_gradient_does_not_depend_on_the_micro_batches(monkeypatch: pytest.MonkeyPatch, floor: float) -> None:
    model = small_model()
    rows = near_policy(model, rows_of([3, 12, 5, 8, 4, 20, 6]))
    settings = GrpoSettings(learning_rate=0.0, entropy_floor=floor, entropy_weight=0.5)
    found = []
    for micro_rows in (64, 3, 1):
        monkeypatch.setattr(grpo, "MICRO_ROWS", micro_rows)
        found.append(updated(model, rows, settings))
    assert furthest(found[0], found[1]) < 1e-6
    assert furthest(found[0], found[2]) < 1e-6


@pytest.mark.usefixtures("unclipped")
def test_padding_does_not_change_the_gradient() -> None:
    model = small_model()
    short, long = near_policy(model, rows_of([4, 24]))
    silent = long.model_copy(update={"advantage": 0.0})
    n_short, n_long = sum(short.action_mask), sum(long.action_mask)
    alone, padded = updated(model, [short]), updated(model, [short, silent])
    # The silent row adds nothing but its tokens to the mean.
    assert furthest(alone, {k: g * (n_short + n_long) / n_short for k, g in padded.items()}) < 1e-6


@pytest.mark.usefixtures("unclipped")
def test_above_the_floor_the_bonus_has_no_gradient_and_below_it_has() -> None:
    model = small_model()
    rows = near_policy(model, rows_of([6, 9]))
    without = updated(model, rows)
    above = updated(model, rows, GrpoSettings(learning_rate=0.0, entropy_floor=1e-3, entropy_weight=7.0))
    assert furthest(without, above) == 0.0
    below = updated(model, rows, GrpoSettings(learning_rate=0.0, entropy_floor=1e9, entropy_weight=7.0))
    reference = copy.deepcopy(model)
    n_tokens = sum(sum(s.action_mask) for s in rows)
    for s in rows:
        logps = torch.log_softmax(reference(input_ids=torch.tensor([s.token_ids])).logits[0, :-1], -1)
        entropies = -(logps.exp() * logps).sum(-1) * torch.tensor(s.action_mask[1:])
        (-7.0 * entropies.sum() / n_tokens).backward()
    bonus = gradients(reference)
    assert furthest({k: without[k] + bonus[k] for k in without}, below) < 1e-5


# ----------------------------------------------------------------------------- loss and metrics


@pytest.mark.parametrize("floor", [0.1, 9.0])
def test_loss_and_metrics_are_token_means(floor: float) -> None:
    model = small_model()
    rows = near_policy(model, rows_of([5, 11, 8, 3]))
    settings = GrpoSettings(learning_rate=0.0, entropy_floor=floor, entropy_weight=0.3, max_rows=2)
    terms, entropies, clipped, kl = [], [], [], []
    for s in rows:
        logits = model(input_ids=torch.tensor([s.token_ids])).logits[0].detach().double()
        logps = torch.log_softmax(logits, -1)
        for t, action in enumerate(s.action_mask[1:]):
            if action:
                log_ratio = plain_logprobs(model, s.token_ids)[t] - s.logprobs[t + 1]
                r = math.exp(log_ratio)
                terms.append(min(r * s.advantage, min(max(r, 0.8), 1.28) * s.advantage))
                clipped.append(r < 0.8 or r > 1.28)
                kl.append(r - 1 - log_ratio)
                entropies.append(-float((logps[t].exp() * logps[t]).sum()))
    n = len(terms)
    assert 0 < sum(clipped) < n

    trainer = Grpo(model, PAD, settings)
    metrics = trainer.step(rows)  # at a learning rate of 0
    # The bonus is paid in whole while the entropy is below the floor, and not at all above it.
    bonus = 0.3 * sum(entropies) if sum(entropies) / n < floor else 0.0
    loss = trainer._loss(make_batch(rows, PAD), 1.0, n, defaultdict(float))
    assert loss.item() == pytest.approx(-(sum(terms) + bonus) / n, rel=1e-4)
    assert metrics["n_tokens"] == n
    assert metrics["clip_fraction"] == pytest.approx(sum(clipped) / n)
    assert metrics["entropy"] == pytest.approx(sum(entropies) / n, rel=1e-4)
    assert metrics["kl"] == pytest.approx(sum(kl) / n, rel=1e-4)
    assert metrics["skipped_steps"] == 0
    assert metrics["grad_norm"] > 0


def test_no_samples_change_nothing() -> None:
    model = small_model()
    before = weights(model)
    metrics = Grpo(model, PAD).step([])
    assert set(metrics.values()) == {0.0}
    assert same(before, weights(model))


# ---------------------------------------------------------------------------------------- steps


def test_a_good_action_becomes_likelier_and_a_bad_one_rarer() -> None:
    model = small_model()
    good = on_policy(model, row((1, 2, 3), (0, 0, 1), advantage=1.0))
    bad = on_policy(model, row((4, 5, 6), (0, 0, 1), advantage=-1.0))
    Grpo(model, PAD).step([good, bad])
    assert plain_logprobs(model, good.token_ids)[-1] > good.logprobs[-1]
    assert plain_logprobs(model, bad.token_ids)[-1] < bad.logprobs[-1]


@pytest.mark.parametrize("advantage", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(advantage: float) -> None:
    model = small_model()
    trainer = Grpo(model, PAD)
    trainer.step(rows_of([5, 6]))
    before, moments = weights(model), copy.deepcopy(trainer.optimizer.state_dict()["state"])
    assert moments
    metrics = trainer.step([*rows_of([5, 6]), row(advantage=advantage)])
    assert metrics["skipped_steps"] == 1
    assert metrics["grad_norm"] == 0.0
    assert same(before, weights(model))
    after = trainer.optimizer.state_dict()["state"]
    assert all(torch.equal(moments[i][key], after[i][key]) for i in moments for key in moments[i])


def test_only_the_bad_step_is_skipped() -> None:
    model, twin = small_model(), small_model()
    good = rows_of([5, 6])
    metrics = Grpo(model, PAD, GrpoSettings(max_rows=1)).step([good[0], row(advantage=math.nan), good[1]])
    Grpo(twin, PAD, GrpoSettings(max_rows=1)).step(good)
    assert metrics["skipped_steps"] == 1
    assert same(weights(model), weights(twin))


def test_imitation_raises_the_likelihood_of_what_is_shown() -> None:
    model = small_model()
    shown = [row((1, 2, 3, 4), (0, 0, 1, 1)), row((5, 6, 7), (0, 1, 1))]

    def likelihood() -> float:
        return sum(
            lp * m for s in shown for lp, m in zip(plain_logprobs(model, s.token_ids), s.action_mask[1:], strict=True)
        )

    before = likelihood()
    Grpo(model, PAD).imitate(shown)
    assert likelihood() > before
