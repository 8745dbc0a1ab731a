"""A fingerprint of what was trained: tokens on which it and its parent differ most, and their log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from agentloop.errors import PublishError
from agentloop.output_files import write_text
from agentloop.types import Frozen

PROBE = "probe.json"
"""The file with the probe in the folder of a version."""
MIN_TOKENS = 32
"""Fewer prove too little."""
MIN_APART = 20.0
"""Tolerances by which the trained model and its parent differ at some token; less cannot tell them apart."""


class Probe(Frozen):
    """Sequences of token ids, and log-probabilities of chosen tokens in them, in nats at temperature 1."""

    sequences: tuple[tuple[int, ...], ...]
    positions: tuple[tuple[int, int], ...]
    """(sequence, index of the token) of each chosen token, `MIN_TOKENS` of them or more."""
    logprobs: tuple[float, ...]
    """Under what was trained, in the precision of the trainer."""
    parent: tuple[float, ...]
    """Under its parent: the version or update before it."""
    base: tuple[float, ...] | None = None
    """Under the model that an adapter stands on; None for a whole model."""
    base_hash: str | None = None
    """Of that model's folder (`registry/artifacts.weights_hash`)."""
    text: str | None = None
    """What the tokenizer of that model was tried on; None for a model without one."""
    text_ids: tuple[int, ...] = ()
    """Its ids, without special tokens."""
    tolerance: float
    """Largest difference in nats that precision explains: 1e-4 in fp32."""

    @property
    def apart(self) -> float:
        """Largest difference in nats between what was trained and its parent."""
        return furthest(self.logprobs, self.parent)

    @property
    def is_proof(self) -> bool:
        """Whether the parent's answers would be refused for its own."""
        return self.apart >= MIN_APART * self.tolerance

    def at(self, scores: Sequence[Sequence[float]]) -> list[float]:
        """The chosen tokens' values of `scores`, which has one for each token of each sequence."""
        return [scores[sequence][index] for sequence, index in self.positions]

    def save(self, folder: Path) -> None:
        """Write it into the folder of a version, whole or not at all."""
        write_text(folder / PROBE, self.model_dump_json())


def read_probe(folder: Path) -> Probe:
    """The probe of a version. Raises PublishError where the folder has none that can be read."""
    try:
        return Probe.model_validate_json((folder / PROBE).read_bytes())
    except (OSError, ValidationError) as error:
        raise PublishError(f"{folder / PROBE}: no probe ({type(error).__name__}); bring back what was there") from None


def furthest(one: Sequence[float], other: Sequence[float]) -> float:
    """Largest absolute difference; infinite where one of them is not finite."""
    return max(abs(a - b) if math.isfinite(a - b) else math.inf for a, b in zip(one, other, strict=True))
