"""What verl 0.9.1 computes on the rows of `frozen`: losses, weights, masks and advantages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from frozen import GROUPS, N_TOKENS, Frozen, inputs
from torch import Tensor


def actor(low: float, high: float, dual: float = 1e9) -> Any:
    """The settings of verl's policy losses."""
    from verl.workers.config import ActorConfig

    sizes = {"rollout_n": 4, "ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 4}
    return ActorConfig(
        strategy="fsdp", clip_ratio=low, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=dual, **sizes
    )


def policy(logps: Tensor, kind: str, config: Any, mode: str, weights: Tensor | None = None) -> Tensor:
    """`compute_policy_loss_vanilla`, `_gspo` or `_cispo`."""
    from verl.trainer.ppo import core_algos

    data = inputs()
    compute = getattr(core_algos, f"compute_policy_loss_{kind}")
    advantages = data["advantages"][:, None].expand(-1, N_TOKENS)
    loss: Tensor = compute(data["old"], logps, advantages, data["mask"], mode, config, weights)[0]
    return loss


def verl_losses(frozen: Frozen) -> None:
    """Policy losses, the critic's, and divergences."""
    from verl.trainer.ppo import core_algos

    data = inputs()
    tokens, rows = "token-mean", "seq-mean-token-mean"
    frozen.loss("dapo", lambda logps: policy(logps, "vanilla", actor(0.2, 0.28), tokens))
    frozen.loss("dapo_dual", lambda logps: policy(logps, "vanilla", actor(0.2, 0.28, 1.5), tokens))
    frozen.loss("grpo", lambda logps: policy(logps, "vanilla", actor(0.2, 0.2), rows))
    frozen.loss("gspo", lambda logps: policy(logps, "gspo", actor(3e-4, 4e-4), rows))
    # A lower bound of 1 cuts nothing off.
    frozen.loss("cispo", lambda logps: policy(logps, "cispo", actor(1.0, 0.28), tokens))
    frozen.loss(
        "decoupled",
        lambda logps: policy(logps, "vanilla", actor(0.2, 0.28), tokens, verl_weights("token", 2.0)),
    )
    for estimator in ("k1", "k2", "k3"):
        frozen.loss(
            estimator,
            lambda logps, estimator=estimator: (
                core_algos.kl_penalty_forward(logps, data["reference"], estimator) * data["mask"]
            ).sum(),
        )
    frozen.loss(
        "value",
        lambda values: core_algos.compute_value_loss(values, data["returns"], data["old_values"], data["mask"], 0.2)[0],
        leaf="values",
    )


def verl_weights(level: str, threshold: float | str) -> Tensor:
    """Importance weights between `old` and `behaviour`."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    data = inputs()
    log_ratio = data["old"] - data["behaviour"]
    weights: Tensor = compute_rollout_correction_weights(log_ratio, data["mask"], level, threshold)[0]
    return weights


def verl_values(frozen: Frozen) -> None:
    """Weights, masks and advantages."""
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    data = inputs()
    for level in ("token", "sequence"):
        frozen.value(f"tis_{level}", verl_weights(level, 1.5))
        frozen.value(f"mis_{level}", verl_weights(level, "0.7_1.5"))
    for name, option, low, high in (
        ("token", "token_k1", 0.7, 1.5),
        ("sequence", "seq_sum_k1", 0.7, 1.5),
        ("geometric", "seq_mean_k1", 0.95, 1.1),
    ):
        # verl bounds the inverse of our ratio.
        bounds = f"{1 / high!r}_{1 / low!r}"
        log_ratio = data["old"] - data["behaviour"]
        frozen.value(f"reject_{name}", compute_rollout_rejection_mask(log_ratio, data["mask"], option, bounds)[0])
    last = data["mask"] * torch.arange(N_TOKENS)
    rewards = torch.zeros_like(data["mask"]).scatter(1, last.argmax(1)[:, None], data["rewards"][:, None])
    advantages, returns = core_algos.compute_gae_advantage_return(
        rewards, data["values"], data["mask"], torch.tensor(0.97), torch.tensor(0.9)
    )
    frozen.value("gae/advantages", advantages * data["mask"])
    frozen.value("gae/returns", returns * data["mask"])
    compute = core_algos.compute_grpo_outcome_advantage
    frozen.value("advantage/grpo", compute(rewards, data["mask"], GROUPS, epsilon=1e-4)[0])
    frozen.value("advantage/dr_grpo", compute(rewards, data["mask"], GROUPS, norm_adv_by_std_in_grpo=False)[0])
    frozen.value("advantage/rloo", core_algos.compute_rloo_outcome_advantage(rewards, data["mask"], GROUPS)[0])


def verl_cases() -> dict[str, np.ndarray]:
    """Every loss, weight and advantage that verl shares with us."""
    frozen = Frozen()
    verl_losses(frozen)
    verl_values(frozen)
    return frozen.arrays
