"""The random rows that every oracle computes on, and what is frozen of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

N_ROWS, N_TOKENS = 8, 12
GROUPS = np.array([0, 0, 0, 0, 1, 1, 1, 2])
"""The last one is a group of one."""


def inputs() -> dict[str, Tensor]:
    """Random rows in float64: ratios on both sides of every clip, advantages of both signs."""
    rng = torch.Generator().manual_seed(20)

    def normal(scale: float, *shape: int) -> Tensor:
        return scale * torch.randn(*shape, generator=rng, dtype=torch.float64)

    mask = (torch.rand(N_ROWS, N_TOKENS, generator=rng) < 0.7).double()
    mask[:, 0] = 1.0
    logps = -4.0 * torch.rand(N_ROWS, N_TOKENS, generator=rng, dtype=torch.float64) - 0.1
    old = logps + normal(0.3, N_ROWS, N_TOKENS)
    return {
        "mask": mask,
        "logps": logps,
        "old": old,
        "behaviour": old + normal(0.4, N_ROWS, N_TOKENS),
        "reference": logps + normal(0.5, N_ROWS, N_TOKENS),
        "advantages": normal(1.0, N_ROWS),
        "rewards": torch.rand(N_ROWS, generator=rng, dtype=torch.float64),
        "values": normal(0.5, N_ROWS, N_TOKENS),
        "old_values": normal(0.5, N_ROWS, N_TOKENS),
        "returns": normal(1.0, N_ROWS, N_TOKENS),
        "mismatched": normal(1.0, N_ROWS) + 0.5,
        "labels": torch.tensor([1.0, 0.0] * (N_ROWS // 2), dtype=torch.float64),
    }


class Frozen:
    """The cases of one package."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}

    def loss(self, name: str, compute: Callable[[Tensor], Tensor], leaf: str = "logps") -> None:
        """Freeze the loss that `compute` makes of one of the inputs, and its gradient."""
        variable = inputs()[leaf].requires_grad_()
        loss = compute(variable)
        (gradient,) = torch.autograd.grad(loss, variable)
        self.arrays[f"{name}/loss"] = loss.detach().numpy()
        self.arrays[f"{name}/grad"] = gradient.numpy()

    def value(self, name: str, value: Tensor) -> None:
        """Freeze a tensor."""
        self.arrays[name] = value.detach().numpy()
