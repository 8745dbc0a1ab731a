"""What TRL 1.16.0 computes on the rows of `frozen`: the loss functions of its trainers, without models or data."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from frozen import N_ROWS, N_TOKENS, Frozen, inputs
from torch import Tensor

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


def reward_model(rewards: Tensor) -> Tensor:
    """`RewardTrainer.compute_loss`: the first half of the rows is chosen."""
    from trl import RewardTrainer

    trainer = bare(RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=None))
    trainer.model = Scorer(rewards)
    loss: Tensor = trainer.compute_loss(trainer.model, {"attention_mask": inputs()["mask"]})
    return loss


class Scorer:
    """A model that answers with scores that were decided before."""

    training = True

    def __init__(self, rewards: Tensor) -> None:
        self.rewards = rewards

    def __call__(self, **_: Any) -> Any:
        return SimpleNamespace(logits=self.rewards[:, None])


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
    frozen.loss("reward_model", reward_model, leaf="rewards")
    return frozen.arrays
