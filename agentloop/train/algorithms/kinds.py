"""The algorithms by name, each made with its own options and with no others."""

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
    """An algorithm and the dataclass of its options."""

    make: Callable[[Any], Algorithm]
    options: type[Any]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the options."""
        return tuple(each.name for each in fields(self.options))


KINDS = {
    "dpo": AlgorithmKind(Dpo, DpoOptions),
    "grpo": AlgorithmKind(Grpo, GrpoOptions),
    "kto": AlgorithmKind(Kto, KtoOptions),
    "ppo": AlgorithmKind(Ppo, PpoOptions),
    "reward_model": AlgorithmKind(RewardModel, RewardModelOptions),
    "rft": AlgorithmKind(Rft, RftOptions),
    "sft": AlgorithmKind(Sft, SftOptions),
}


def algorithm(kind: str, options: Mapping[str, Any]) -> Algorithm:
    """The algorithm `kind` with `options`.

    Raises ConfigError for a kind that is not one of `KINDS`, for an option that it does not have, and for one that its
    loss does not use.
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
