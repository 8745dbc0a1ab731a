"""Batches and log-probabilities against one unpadded row at a time, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentloop.train.logprobs import entropy, make_batch, parts, token_logprobs

from .rows import N_VOCAB, PAD, plain_logprobs, row, rows_of, small_model


def test_a_batch_by_hand() -> None:
    batch = make_batch(
        [
            row((5, 6, 7), (0, 1, 1), logprobs=(0.0, -1.0, -2.0), advantage=2.0),
            row((8, 9), (0, 1), logprobs=(0.0, -3.0), advantage=-1.0),
        ],
        PAD,
    )
    assert batch.ids_BT.tolist() == [[5, 6, 7], [8, 9, PAD]]
    assert batch.action_BT.tolist() == [[True, True], [True, False]]
    assert batch.real_BT.tolist() == [[True, True], [True, False]]
    assert batch.behaviour_BT.tolist() == [[-1.0, -2.0], [-3.0, 0.0]]
    assert batch.advantage_B.tolist() == [2.0, -1.0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_they_are_those_of_a_plain_softmax(temperature: float) -> None:
    model, samples = small_model(), rows_of([9, 3, 6])
    batch = make_batch(samples, PAD)
    logprobs_N, logps_NV = token_logprobs(model, batch.ids_BT, batch.action_BT, temperature)
    expected = [
        logprob
        for sample in samples
        for logprob, action in zip(
            plain_logprobs(model, sample.token_ids, temperature), sample.action_mask[1:], strict=True
        )
        if action
    ]
    assert max(expected) - min(expected) > 1.0
    assert logprobs_N.tolist() == pytest.approx(expected, abs=1e-5)
    assert logps_NV.shape == (len(expected), N_VOCAB)
    assert logps_NV.exp().sum(-1).tolist() == pytest.approx([1.0] * len(expected), abs=1e-5)


def test_entropy_by_hand() -> None:
    probabilities = [[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3], [0.98, 0.01, 0.01]]
    expected = [-sum(p * math.log(p) for p in row) for row in probabilities]
    assert expected[:2] == pytest.approx([1.5 * math.log(2), math.log(3)])
    assert entropy(torch.tensor(probabilities).log()).tolist() == pytest.approx(expected, abs=1e-6)


@given(st.integers(1, 200), st.integers(1, 70))
def test_parts_are_everything_in_order_and_nearly_equal(n: int, max_rows: int) -> None:
    samples = [row(advantage=float(i)) for i in range(n)]
    made = parts(samples, max_rows)
    assert [s for part in made for s in part] == samples
    sizes = [len(part) for part in made]
    assert max(sizes) <= max_rows
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == math.ceil(n / max_rows)
