"""Advantages from a critic: actual minus expected reward, smoothed over the following steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from agentloop.train.data.row import Floats, Mask

EPSILON = 1e-8


class Estimates(NamedTuple):
    """Estimates for one row, shape (T,), 0 at tokens that were not sampled."""

    advantages: Floats
    returns: Floats


def estimates(rewards_T: Floats, values_T: Floats, action_T: Mask, *, gamma: float, lam: float) -> Estimates:
    """Generalised advantage estimates, and the returns that the critic should predict.

    rewards_T: earned by each token. values_T: of the state before each token. Tokens that were not sampled are no
    steps: the value after an action is the value before the next action. After the last action it is 0. Source:
    arXiv:1506.02438 eq. 16.
    """
    places = np.flatnonzero(action_T)
    rewards = rewards_T[places].astype(np.float64)
    values = values_T[places].astype(np.float64)
    errors = (rewards + gamma * np.append(values[1:], 0.0) - values).tolist()
    later = 0.0
    smoothed = []
    for error in reversed(errors):
        later = error + gamma * lam * later
        smoothed.append(later)
    advantages = np.zeros(len(action_T), dtype=np.float32)
    returns = np.zeros(len(action_T), dtype=np.float32)
    advantages[places] = smoothed[::-1]
    returns[places] = np.array(smoothed[::-1]) + values
    return Estimates(advantages, returns)


def whitened(advantages: Sequence[Floats], actions: Sequence[Mask]) -> list[Floats]:
    """`advantages` of several rows with mean 0 and variance 1 over all their actions; unchanged for a single action."""
    every = np.concatenate([own[mask] for own, mask in zip(advantages, actions, strict=True)]).astype(np.float64)
    if len(every) < 2:
        return list(advantages)
    mean = every.mean()
    scale = 1.0 / np.sqrt(every.var(ddof=1) + EPSILON)
    return [
        np.where(mask, (own - mean) * scale, 0.0).astype(np.float32)
        for own, mask in zip(advantages, actions, strict=True)
    ]
