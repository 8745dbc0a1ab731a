"""Small models and rows with seeded contents, and a second, plain way to read log-probabilities off a model."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from agentloop.policies.tiny import new_model
from agentloop.types import Sample

torch.set_num_threads(1)

PAD = 0
N_VOCAB = 11


def small_model(seed: int = 3, n_vocab: int = N_VOCAB, layers: int = 1) -> Qwen2ForCausalLM:
    """A model whose distributions are far from uniform, so that wrong targets and temperatures show."""
    model = new_model(n_vocab, seed=seed, width=16, layers=layers, heads=2)
    with torch.no_grad():
        model.lm_head.weight.mul_(12.0)
    return model


def row(
    token_ids: Sequence[int] = (1, 2, 3),
    action_mask: Sequence[int] = (0, 1, 1),
    *,
    logprobs: Sequence[float] | None = None,
    advantage: float = 1.0,
    reward: float = 0.0,
    group: str = "g",
    temperature: float = 1.0,
) -> Sample:
    """A row for the trainer; log-probabilities are 0 unless given."""
    return Sample(
        episode_id="e",
        group=group,
        pool="p",
        policy_version=1,
        token_ids=tuple(token_ids),
        action_mask=tuple(action_mask),
        logprobs=tuple(logprobs or [0.0] * len(token_ids)),
        temperature=temperature,
        reward=reward,
        advantage=advantage,
    )


def rows_of(lengths: Sequence[int], seed: int = 5, temperature: float = 1.0) -> list[Sample]:
    """Rows of these lengths with random tokens, masks, behaviour log-probabilities and advantages of both signs."""
    rng = random.Random(seed)
    made = []
    for number, length in enumerate(lengths):
        mask = [0, 1, *(rng.randint(0, 1) for _ in range(length - 2))]
        made.append(
            row(
                [rng.randrange(1, N_VOCAB) for _ in range(length)],
                mask,
                logprobs=[-rng.uniform(0.5, 4.0) * m for m in mask],
                advantage=rng.uniform(0.2, 2.0) * (-1) ** number,
                temperature=temperature,
            )
        )
    return made


def plain_logprobs(model: Qwen2ForCausalLM, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Log-probability of each token but the first: one unpadded row, all logits, float64 softmax."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)])).logits[0].double() / temperature
    logps = logits - logits.exp().sum(-1, keepdim=True).log()
    return [float(logps[t, ids[t + 1]]) for t in range(len(ids) - 1)]


def on_policy(model: Qwen2ForCausalLM, sample: Sample) -> Sample:
    """`sample` with the log-probabilities that `model` gives its actions."""
    logprobs = [0.0, *plain_logprobs(model, sample.token_ids, sample.temperature)]
    masked = tuple(lp * m for lp, m in zip(logprobs, sample.action_mask, strict=True))
    return sample.model_copy(update={"logprobs": masked})


def near_policy(model: Qwen2ForCausalLM, samples: Sequence[Sample], seed: int = 8) -> list[Sample]:
    """`samples` as if sampled by a policy close to `model`: ratios on both sides of both clips, and between them."""
    rng = random.Random(seed)
    made = []
    for sample in samples:
        exact = on_policy(model, sample)
        moved = (lp + rng.uniform(-0.6, 0.6) * m for lp, m in zip(exact.logprobs, exact.action_mask, strict=True))
        made.append(exact.model_copy(update={"logprobs": tuple(moved)}))
    return made


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of all gradients by parameter name."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of all weights by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """True when both hold the same bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference between two sets of tensors, as a share of the largest entry."""
    assert a.keys() == b.keys()
    largest = max(float(t.abs().max()) for t in a.values())
    return max(float((a[name] - b[name]).abs().max()) for name in a) / largest
