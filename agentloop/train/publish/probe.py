"""Tokens on which a trained model and its parent differ most, with what torch says of them: a fingerprint to check."""

from __future__ import annotations

from agentloop.types import Frozen

MIN_TOKENS = 32
"""Fewer prove too little."""


class Probe(Frozen):
    """Sequences of token ids, and log-probabilities of chosen tokens in them under the trained model and its parent."""

    sequences: tuple[tuple[int, ...], ...]
    positions: tuple[tuple[int, int], ...]
    """(sequence, index of the token) of each chosen token."""
    logprobs: tuple[float, ...]
    """In nats at temperature 1, under what was trained, in the precision of the trainer."""
    parent: tuple[float, ...]
    """The same under its parent."""
    tolerance: float
    """Largest difference in nats that precision explains: 1e-4 in fp32."""
    base_hash: str | None = None
    """Of the model that an adapter stands on (`registry/artifacts.weights_hash`); None for a whole model."""
