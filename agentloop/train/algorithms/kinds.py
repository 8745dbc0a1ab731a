"""The algorithms by name. Each accepts exactly its own options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from agentloop.errors import ConfigError, did_you_mean
from agentloop.train.algorithms.algorithm import Algorithm
from agentloop.train.algorithms.dpo import Dpo, DpoOptions
from agentloop.train.algorithms.grpo import Grpo, GrpoOptions
from agentloop.train.algorithms.kto import Kto, KtoOptions
from agentloop.train.algorithms.ppo import Ppo, PpoOptions
from agentloop.train.algorithms.reward_model import RewardModel, RewardModelOptions
from agentloop.train.algorithms.sft import Rft, RftOptions, Sft, SftOptions


class AlgorithmKind(NamedTuple):
    """An algorithm with the dataclass of its options."""

    make: Callable[[Any], Algorithm]
    options: type[Any]
    purpose: str
    """One line for `agentloop train kinds`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the options."""
        return tuple(each.name for each in fields(self.options))


KINDS = {
    "dpo": AlgorithmKind(
        Dpo, DpoOptions, "Learns from pairs at one task, an attempt that passed and one that failed (DPO, IPO)."
    ),
    "grpo": AlgorithmKind(
        Grpo,
        GrpoOptions,
        "Learns from its own attempts, each compared with the others at the same task (GRPO and its variants).",
    ),
    "kto": AlgorithmKind(
        Kto, KtoOptions, "Learns from single traces that are good or bad, such as live traffic (KTO)."
    ),
    "ppo": AlgorithmKind(
        Ppo,
        PpoOptions,
        "Learns from its own attempts, compared with what a critic expects, which is trained beside it (PPO).",
    ),
    "reward_model": AlgorithmKind(
        RewardModel,
        RewardModelOptions,
        "Makes a model of rewards from pairs at one task, one that passed and one that failed.",
    ),
    "rft": AlgorithmKind(
        Rft, RftOptions, "Imitates those attempts that earned a reward of at least `threshold` (rejection sampling)."
    ),
    "sft": AlgorithmKind(
        Sft, SftOptions, "Imitates stored traces: what the assistant said becomes more likely (supervised)."
    ),
}


def algorithm(kind: str, options: Mapping[str, Any]) -> Algorithm:
    """The algorithm `kind` with `options`.

    Raises ConfigError for a kind that is not in `KINDS`, for an unknown option, and for an option that its loss does
    not use.
    """
    if kind not in KINDS:
        raise ConfigError(f"no algorithm {kind!r} (algorithms: {', '.join(KINDS)}){did_you_mean(kind, KINDS)}")
    names = KINDS[kind].names
    for name in options:
        if name not in names:
            raise ConfigError(
                f"algorithm {kind!r} has no option {name!r} (options: {', '.join(names)}){did_you_mean(name, names)}"
            )
    return KINDS[kind].make(KINDS[kind].options(**options))
