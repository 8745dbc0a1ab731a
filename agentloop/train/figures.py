"""Figures of one step of training: the names under which trainers record them and curves, reports and alarms read them.

A trainer records with `Draft.record(step, **figures)`. A family's name is followed by `/` and its member, as in
`reward/exact` or `seconds/judge`: see `of`. A trainer omits figures that it does not measure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

REWARD = "reward"
"""Mean reward of the step's scored trajectories, in [0, 1]; `reward/VERIFIER` is the part of one verifier."""
SPREAD = "spread"
"""Mean over groups of the standard deviation of their rewards; 0 if no group has anything to learn from."""
ENTROPY = "entropy"
"""Mean entropy of the policy at a sampled token, in nats."""
LOSS = "loss"
CLIP = "clip"
"""`clip/positive`, `clip/negative`: share of the tokens with an advantage of that sign whose ratio was clipped."""
POSITIVE, NEGATIVE = "positive", "negative"
"""Members of CLIP."""
MISMATCH = "mismatch"
"""Mean of abs(trainer's - sampler's log-probability) over sampled tokens before the first update, in nats.
`mismatch/worst` is the maximum."""
EFFECTIVE = "effective"
"""Effective sample share: (sum of w)^2 / (n * sum of w^2) of the importance weights w of n tokens, in (0, 1]."""
KL = "kl"
"""Mean KL divergence to the reference at a sampled token, in nats (k3)."""
GRADIENT = "gradient"
"""Norm of the gradient before it is clipped."""
LENGTH = "length"
"""Mean number of sampled tokens of a trajectory; `length/longest` is the maximum."""
LAG = "lag"
"""Mean number of versions (within a turn: updates) between the policy that sampled a trajectory and the one that learns
from it; `lag/worst` is the maximum."""
WORST, LONGEST = "worst", "longest"
"""Members of MISMATCH and LAG, and of LENGTH."""
ROWS = "rows"
"""Number of rows of the step; `rows/used` counts those that carried a gradient."""
USED = "used"
"""Member of ROWS."""
EXCLUDED = "excluded"
"""`excluded/REASON`: number of trajectories or rows that did not train, by the reason's name."""
SECONDS = "seconds"
"""`seconds/PHASE`: wall-clock seconds of the step in each StepPhase. `judge`, and with a server `generate`, are sums
over attempts, which run concurrently."""
TOKENS = "tokens"
"""`tokens/PHASE`: tokens processed in a phase; `generate` counts sampled tokens, `train` prompts and samples."""
SKIPPED = "skipped"
"""Number of optimiser steps skipped because the loss or the gradient was not finite."""
RATE = "rate"
"""Learning rate."""
NLL = "nll"
"""Mean negative log-likelihood of a learned token, in nats."""
ACCURACY = "accuracy"
"""Share of pairs whose chosen trajectory the model prefers."""
MARGIN = "margin"
"""Mean lead of the chosen trajectory of a pair, in the unit of the loss."""
VALUE_LOSS, VALUE_CLIP = "value_loss", "value_clip"
"""A critic's loss, and the share of its values that were clipped."""
FORKED = "forked"
"""Number of attempts that continued from the last good step of a task in which all other attempts failed."""
RATIO = "ratio"
"""Mean importance ratio of the trained model to the sampler; 1 on policy."""
SAMPLER_KL = "sampler_kl"
"""Mean KL divergence of the trained model from the sampler at a sampled token, in nats (k3)."""
MASKED = "masked"
"""Share of the sampled tokens that a correction for mismatch gave zero weight."""
UNPROVEN = "unproven"
"""1 if the update changed the server's answers too little to distinguish them from those before it, else 0."""
REVIVED = "revived"
"""Number of rows imitated because every trajectory of a group failed."""


class StepPhase(StrEnum):
    """Phases of a step, for its time and tokens; members of SECONDS and TOKENS."""

    generate = "generate"
    """The policy samples, and tools run."""
    wait = "wait"
    """The trainer waits for attempts."""
    judge = "judge"
    train = "train"
    publish = "publish"


SHARE = "share"
"""Unit of figures shown as a percentage."""


class About(NamedTuple):
    """Meaning and unit of a figure or a family, for readers of curves."""

    meaning: str
    unit: str = ""
    """Unit of the values; '' for a plain number."""


ABOUT: Mapping[str, About] = {
    REWARD: About("mean reward of the trajectories; its parts are those of one verifier each"),
    SPREAD: About("how far rewards differ within a group, as a standard deviation"),
    ENTROPY: About("how undecided the policy is at a token", "nats"),
    LOSS: About("what the optimiser makes small"),
    CLIP: About("tokens whose ratio was clipped, by the sign of their advantage", SHARE),
    MISMATCH: About("trainer's and sampler's log-probabilities differ by", "nats"),
    EFFECTIVE: About("effective sample share of the importance weights", SHARE),
    KL: About("distance to the reference at a token", "nats"),
    GRADIENT: About("norm of the gradient before it is clipped"),
    LENGTH: About("sampled tokens of a trajectory", "tokens"),
    LAG: About("updates between the policy that sampled and the one that learned", "updates"),
    ROWS: About("rows of the step, and those that carried a gradient", "rows"),
    EXCLUDED: About("what did not train, by reason"),
    SECONDS: About("wall-clock time of the step, by phase", "s"),
    TOKENS: About("tokens that a phase handled", "tokens"),
    SKIPPED: About("optimiser steps that were not made", "steps"),
    RATE: About("learning rate"),
    NLL: About("negative log-likelihood of a learned token", "nats"),
    ACCURACY: About("pairs whose chosen trajectory the model prefers", SHARE),
    MARGIN: About("lead of the chosen trajectory of a pair"),
    VALUE_LOSS: About("loss of the critic"),
    VALUE_CLIP: About("values of the critic that were clipped", SHARE),
    FORKED: About("attempts that went on from the last good step of a dead task", "attempts"),
    RATIO: About("importance ratio of the trained model to the sampler"),
    SAMPLER_KL: About("distance of the trained model from the sampler at a token", "nats"),
    MASKED: About("tokens that a correction gave no weight", SHARE),
    UNPROVEN: About("updates that the server's answers could not tell from the version before", "updates"),
    REVIVED: About("rows imitated because whole groups failed", "rows"),
}
"""All figures and families in display order; figures of other names come after them."""


def of(family: str, member: str) -> str:
    """The name of a family's member: `of(SECONDS, StepPhase.judge)` is `seconds/judge`."""
    return f"{family}/{member}"


def family(name: str) -> str:
    """The name without its member."""
    return name.partition("/")[0]


def in_order(names: Iterable[str]) -> list[str]:
    """The distinct `names` in display order: a figure before its members, phases in the order of a step."""
    families, phases = list(ABOUT), [str(phase) for phase in StepPhase]

    def place(name: str) -> tuple[int, str, int, str]:
        member = name.partition("/")[2]
        rank = families.index(family(name)) if family(name) in ABOUT else len(families)
        # By name, `negative` would come first.
        if member == POSITIVE:
            return rank, family(name), 0, member
        return rank, family(name), phases.index(member) if member in phases else 1, member

    return sorted(set(names), key=place)


def counts(family: str, numbers: Mapping[str, float]) -> dict[str, float]:
    """Figures of a family with a member for each key, as in `counts(EXCLUDED, dropped)`."""
    return {of(family, str(name)): float(value) for name, value in numbers.items()}
