"""Makes the probe of what was trained: torch's own word on the tokens where it and its parent differ most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from agentloop.errors import TrainingError
from agentloop.publish.probe import MIN_TOKENS, Probe
from agentloop.train.batches import Shapes, make_batch, padded_layout
from agentloop.train.data.row import Row
from agentloop.train.model import Trainable, score

MAX_SEQUENCES = 4
MAX_TOKENS = 64
"""Chosen tokens."""
MAX_CANDIDATES = 64
"""Sequences that are scored to find those."""
MAX_LENGTH = 1024
"""Tokens of a sequence; a longer row is cut off behind them."""
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Nats that precision explains, by the type of computation."""


def make_probe(
    trainable: Trainable,
    rows: Sequence[Row],
    parent: Mapping[str, Tensor] | None = None,
    *,
    base_hash: str | None = None,
) -> Probe:
    """The probe of `trainable` as it is now.

    rows: sequences of tokens to choose from. parent: `Trainable.state()` of what came before; None: the base model,
    or the kept reference. Deterministic. Raises TrainingError where the rows have fewer than 32 tokens.
    """
    sequences = list(dict.fromkeys(tuple(map(int, row.token_ids[:MAX_LENGTH])) for row in rows))[:MAX_CANDIDATES]
    if sum(len(ids) - 1 for ids in sequences) < MIN_TOKENS:
        raise TrainingError(f"a probe needs {MIN_TOKENS} tokens; the rows have fewer")
    own = _logprobs(trainable, sequences)
    base = _logprobs(trainable, sequences, of_reference=True) if trainable.lora is not None or parent is None else None
    before = base
    if parent is not None:
        trained = trainable.state()
        trainable.load_state(parent)
        before = _logprobs(trainable, sequences)
        trainable.load_state(trained)
    assert before is not None  # noqa: S101 - of the reference, or of the parent
    apart = [np.abs(one - other) for one, other in zip(own, before, strict=True)]
    chosen = _most_telling(apart)
    found = [(n, int(t)) for n in range(len(chosen)) for t in range(1, len(sequences[chosen[n]]))]
    found.sort(key=lambda at: (-float(apart[chosen[at[0]]][at[1]]), at))
    positions = tuple(sorted(found[:MAX_TOKENS]))

    def at(values: list[np.ndarray]) -> tuple[float, ...]:
        return tuple(float(values[chosen[n]][t]) for n, t in positions)

    return Probe(
        sequences=tuple(sequences[n] for n in chosen),
        positions=positions,
        logprobs=at(own),
        parent=at(before),
        base=at(base) if base is not None and trainable.lora is not None else None,
        base_hash=base_hash,
        tolerance=TOLERANCES[trainable.dtype],
    )


def _most_telling(apart: Sequence[np.ndarray]) -> list[int]:
    """The sequences with the largest difference, and as many as MIN_TOKENS needs."""
    order = sorted(range(len(apart)), key=lambda n: (-float(apart[n][1:].max(initial=0.0)), n))
    chosen = order[:MAX_SEQUENCES]
    for n in order[MAX_SEQUENCES:]:
        if sum(len(apart[each]) - 1 for each in chosen) >= MIN_TOKENS:
            break
        chosen.append(n)
    return chosen


@torch.no_grad()
def _logprobs(
    trainable: Trainable, sequences: Sequence[tuple[int, ...]], *, of_reference: bool = False
) -> list[np.ndarray]:
    """Of each sequence, log-probabilities (T,) in nats at temperature 1; 0 for its first token."""
    answers: list[np.ndarray] = []
    for ids in sequences:
        batch = make_batch([(row_of(ids),)], {}, Shapes(trainable.device))
        layout = padded_layout(batch)
        if of_reference:
            values = trainable.reference(layout)
        else:
            with trainable.precision():
                values = score(trainable.actor, layout).logprobs_N
        answers.append(np.concatenate([[0.0], values.float().cpu().numpy()]))
    return answers


def row_of(ids: Sequence[int]) -> Row:
    """A row of these tokens alone, all but the first of them to be scored."""
    mask = np.ones(len(ids), dtype=np.bool_)
    mask[0] = False
    return Row(
        trajectory="probe",
        group=None,
        task=None,
        pool="",
        token_ids=np.array(ids, dtype=np.int32),
        action_mask=mask,
        logprobs=None,
        temperature=1.0,
        turns=(),
        reward=None,
    )
