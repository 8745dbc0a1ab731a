"""A small model, and what its weights and gradients are."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from agentloop.policies.tiny import new_model

torch.set_num_threads(1)

PAD = 0
N_VOCAB = 11


def small_model(seed: int = 3, n_vocab: int = N_VOCAB, layers: int = 1) -> Qwen2ForCausalLM:
    """A model whose distributions are far from uniform, so that wrong targets and temperatures show."""
    model = new_model(n_vocab, seed=seed, width=16, layers=layers, heads=2)
    with torch.no_grad():
        model.lm_head.weight.mul_(12.0)
    return model


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
