"""Losses, gradients, weights and advantages as TRL 1.16.0 and verl 0.9.1 compute them, frozen for our tests.

Needs both packages, and nothing of agentloop: `python tests/train/oracles/make.py FOLDER` writes `trl.npz` and
`verl.npz`. Each case `NAME` has `NAME/loss` and `NAME/grad`, the gradient by the log-probabilities of `inputs`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


# ----------------------------------------------------------------------------------------- TRL

ACCELERATOR = SimpleNamespace(
    device=torch.device("cpu"),
    num_processes=1,
    gather=lambda value: value,
    gather_for_metrics=lambda value: value,
    reduce=lambda value, reduction: value,
    unwrap_model=lambda model: model,
)


def bare(trainer: type, **attributes: Any) -> Any:
    """A trainer of TRL with what its loss looks at, and neither a model nor data."""
    made = object.__new__(trainer)
    common = {
        "accelerator": ACCELERATOR,
        "aux_loss_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "model": SimpleNamespace(training=True),
        "current_gradient_accumulation_steps": 1,
    }
    for name, value in {**common, **attributes}.items():
        setattr(made, name, value)
    return made


def grpo(logps: Tensor, loss_type: str, **changes: Any) -> Tensor:
    """`GRPOTrainer._compute_loss`. changes: attributes of the trainer and of its `args`."""
    from trl import GRPOTrainer

    data = inputs()
    arguments = {
        "delta": changes.pop("delta", None),
        "use_bias_correction_kl": False,
        "steps_per_generation": 1,
    }
    attributes = {
        "loss_type": loss_type,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "max_completion_length": 16,
        "_entropy_bonus_enabled": False,
    }
    trainer = bare(GRPOTrainer, args=SimpleNamespace(**arguments), **{**attributes, **changes})
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logps, torch.zeros_like(logps), None)
    loss: Tensor = trainer._compute_loss(
        trainer.model,
        _completions(data)
        | {
            "advantages": data["advantages"],
            "old_per_token_logps": data["old"],
            "sampling_per_token_logps": data["old"],
            "ref_per_token_logps": data["reference"],
            "num_items_in_batch": data["mask"].sum(),
        },
    )
    return loss


def rloo(logps: Tensor) -> Tensor:
    """`RLOOTrainer._compute_loss`."""
    from trl import RLOOTrainer

    data = inputs()
    trainer = bare(RLOOTrainer, epsilon_low=0.2, epsilon_high=0.2, beta=0.0)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logps, torch.zeros_like(logps), None)
    loss: Tensor = trainer._compute_loss(
        trainer.model,
        _completions(data)
        | {
            "advantages": data["advantages"],
            "old_logps": (data["old"] * data["mask"]).sum(1),
        },
    )
    return loss


def _completions(data: dict[str, Tensor]) -> dict[str, Tensor]:
    ids = torch.ones(N_ROWS, N_TOKENS, dtype=torch.long)
    return {"prompt_ids": ids[:, :2], "prompt_mask": ids[:, :2], "completion_ids": ids, "completion_mask": data["mask"]}


class Answers:
    """A model that answers with log-probabilities that were decided before, in the order of the calls."""

    def __init__(self, *answers: Tensor) -> None:
        self.answers = list(answers)

    def __call__(self, **_: Any) -> Any:
        logps = self.answers.pop(0)
        zeros = torch.zeros_like(logps)
        return SimpleNamespace(
            log_probs=logps, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), label_mask=inputs()["mask"].bool()
        )


def _sequences(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """One token more than there are targets."""
    mask = torch.cat([torch.zeros(N_ROWS, 1, dtype=torch.float64), data["mask"]], 1)
    ids = torch.ones(N_ROWS, N_TOKENS + 1, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": ids, "completion_mask": mask}


def dpo(logps: Tensor, loss_type: str, beta: float) -> Tensor:
    """`DPOTrainer._compute_loss`: the first half of the rows is chosen."""
    from trl import DPOTrainer

    data = inputs()
    trainer = bare(
        DPOTrainer,
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        precompute_ref_logps=True,
    )
    chosen, rejected = (data["reference"] * data["mask"]).sum(1).chunk(2)
    batch = _sequences(data) | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    loss: Tensor = trainer._compute_loss(Answers(logps * data["mask"]), batch, False)
    return loss


def kto(logps: Tensor) -> Tensor:
    """`KTOTrainer._compute_loss`, lambdas 1.5 and 0.7; the log-ratios of mismatched answers are `mismatched`."""
    from trl import KTOTrainer

    data = inputs()
    spread = data["mismatched"][:, None].expand(-1, N_TOKENS) / N_TOKENS
    trainer = bare(
        KTOTrainer,
        loss_type="kto",
        calculate_KL=True,
        beta=0.3,
        desirable_weight=1.5,
        undesirable_weight=0.7,
        precompute_ref_logps=True,
    )
    own = _sequences(data)
    other = {f"KL_{name}": value for name, value in own.items()}
    references = {"ref_logps": (data["reference"] * data["mask"]).sum(1), "ref_KL_logps": torch.zeros(N_ROWS)}
    batch = own | other | references | {"label": data["labels"]}
    loss: Tensor = trainer._compute_loss(Answers(spread, logps * data["mask"]), batch, False)
    return loss


def sft(logps: Tensor) -> Tensor:
    """`SFTTrainer.compute_loss`."""
    from trl import SFTTrainer

    data = inputs()
    trainer = bare(
        SFTTrainer,
        compute_loss_func=None,
        label_smoother=None,
        args=SimpleNamespace(loss_type="nll", average_tokens_across_devices=False),
    )
    trainer.accelerator = SimpleNamespace(**vars(ACCELERATOR), parallelism_config=None)
    batch = {name: value for name, value in _sequences(data).items() if name != "completion_mask"}
    loss: Tensor = trainer.compute_loss(Answers(logps * data["mask"]), batch)
    return loss


def trl_cases() -> dict[str, np.ndarray]:
    """Every loss that TRL shares with us."""
    frozen = Frozen()
    frozen.loss("grpo", lambda logps: grpo(logps, "grpo"))
    frozen.loss("grpo_k3", lambda logps: grpo(logps, "grpo", beta=0.3))
    frozen.loss("grpo_dual", lambda logps: grpo(logps, "grpo", delta=1.3))
    frozen.loss("grpo_off_policy", lambda logps: grpo(logps, "grpo", off_policy_mask_threshold=0.05))
    frozen.loss("dr_grpo", lambda logps: grpo(logps, "dr_grpo"))
    frozen.loss("dapo", lambda logps: grpo(logps, "dapo", epsilon_high=0.28))
    frozen.loss("bnpo", lambda logps: grpo(logps, "bnpo"))
    frozen.loss("cispo", lambda logps: grpo(logps, "cispo", epsilon_high=1.28))
    for name, low, high in (("gspo", 3e-4, 4e-4), ("gspo_wide", 0.05, 0.05)):
        frozen.loss(
            name,
            lambda logps, low=low, high=high: grpo(
                logps, "grpo", epsilon_low=low, epsilon_high=high, importance_sampling_level="sequence"
            ),
        )
    frozen.loss("rloo", rloo)
    frozen.loss("dpo", lambda logps: dpo(logps, "sigmoid", 0.1))
    frozen.loss("ipo", lambda logps: dpo(logps, "ipo", 0.3))
    frozen.loss("kto", kto)
    frozen.loss("sft", sft)
    return frozen.arrays


# ---------------------------------------------------------------------------------------- verl


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


def main(folder: Path) -> None:
    """Write both files, each with the inputs."""
    frozen_inputs = {f"inputs/{name}": value.numpy() for name, value in inputs().items()}
    for name, cases in (("trl", trl_cases), ("verl", verl_cases)):
        np.savez_compressed(folder / f"{name}.npz", **frozen_inputs, **cases())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
