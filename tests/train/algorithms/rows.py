"""Rows, batches and scores over a small model, made plainly: the engine's part of an optimiser step, in few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from agentloop.train.algorithms.algorithm import Algorithm, Batch, Figures, Need, RowScore, Scored, Whole
from agentloop.train.algorithms.figures import complete
from agentloop.train.data.row import Row, Turn, Unit
from train.rows import N_VOCAB, PAD, gradients


def row(
    ids: Sequence[int] = (1, 2, 3),
    mask: Sequence[int] = (0, 1, 1),
    *,
    trajectory: str = "t",
    group: str | None = "g",
    reward: float | None = 0.0,
    advantage: float | None = None,
    logprobs: Sequence[float] | None = None,
    temperature: float = 1.0,
) -> Row:
    """A row; its sampler's log-probabilities are -1 unless given."""
    actions = np.array(mask, dtype=np.bool_)
    made = Row(
        trajectory=trajectory,
        group=group,
        task=group,
        pool="p",
        token_ids=np.array(ids, dtype=np.int32),
        action_mask=actions,
        logprobs=np.where(actions, np.array(logprobs or [-1.0] * len(ids), dtype=np.float32), np.float32(0)),
        temperature=temperature,
        turns=(Turn(0, len(ids), trajectory, 0, 1),),
        reward=reward,
    )
    return made if advantage is None else made.with_advantage(advantage)


def random_rows(lengths: Sequence[int], seed: int = 5, group_size: int = 2) -> list[Row]:
    """Rows of these lengths, a trajectory each, with rewards that differ within a group."""
    rng = np.random.default_rng(seed)
    rows = []
    for number, length in enumerate(lengths):
        mask = [0, 1, *rng.integers(0, 2, length - 2).tolist()]
        rows.append(
            row(
                rng.integers(1, N_VOCAB, length).tolist(),
                mask,
                trajectory=f"t{number}",
                group=f"g{number // group_size}",
                reward=float(number % 2),
                logprobs=(-rng.uniform(0.5, 4.0, length)).tolist(),
            )
        )
    return rows


def near(model: Qwen2ForCausalLM, rows: Sequence[Row], spread: float = 0.4, seed: int = 8) -> list[Row]:
    """`rows` as if sampled by a policy close to `model`; on policy where `spread` is 0."""
    rng = np.random.default_rng(seed)
    made = []
    for one in rows:
        with torch.no_grad():
            exact = token_logprobs(model, one)[0]
        noise = rng.uniform(-spread, spread, len(one))
        logprobs = np.where(one.action_mask, np.concatenate([[0.0], exact.double().numpy()]) + noise, 0.0)
        made.append(replace(one, logprobs=logprobs.astype(np.float32)))
    return made


def token_logprobs(model: Qwen2ForCausalLM, one: Row) -> tuple[Tensor, Tensor]:
    """(log-probabilities (T-1,) of tokens 1 on, entropies (T-1,)), one unpadded row at a time."""
    ids = torch.tensor(one.token_ids.astype(np.int64))
    logps = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1] / one.temperature, -1)
    return logps.gather(1, ids[1:, None])[:, 0], -(logps.exp() * logps).sum(-1)


def batch_of(units: Sequence[Unit], algorithm: Algorithm, own: Mapping[str, int] | None = None) -> Batch:
    """One micro-batch. own: sampled tokens of each trajectory in the step; None: those of `units`."""
    rows = [one for unit in units for one in unit]
    own = own or own_tokens(units)
    length = max(map(len, rows))

    def padded(arrays: Iterable[np.ndarray | None], fill: float = 0.0) -> Tensor:
        """Of shape (B, T); zeros for None."""
        filled = [np.zeros(0) if array is None else array for array in arrays]
        padded_arrays = [
            np.pad(array.astype(np.float64), (0, length - len(array)), constant_values=fill) for array in filled
        ]
        return torch.tensor(np.array(padded_arrays))

    action_BT = padded(one.action_mask for one in rows)[:, 1:].bool()
    real_BT = padded(np.ones(len(one)) for one in rows)[:, 1:].bool()
    select_BT = real_BT if algorithm.scores_context else action_BT
    row_N = torch.nonzero(select_BT)[:, 0]

    def selected(arrays: Iterable[np.ndarray | None]) -> Tensor:
        return padded(arrays)[:, 1:][select_BT].float()

    has_old = all(one.old_logprobs is not None for one in rows)
    has_values = all(one.values is not None for one in rows)
    return Batch(
        rows=tuple(rows),
        ids_BT=padded((one.token_ids for one in rows), PAD).long(),
        select_BT=select_BT,
        row_N=row_N,
        action_N=action_BT[select_BT],
        behaviour_N=selected(one.logprobs for one in rows),
        old_N=selected(one.old_logprobs for one in rows) if has_old else None,
        advantage_N=selected(one.advantages for one in rows),
        return_N=selected(one.returns for one in rows),
        value_N=selected(one.values for one in rows) if has_values else None,
        temperature_B=torch.tensor([one.temperature for one in rows]),
        reward_B=torch.tensor([float("nan") if one.reward is None else one.reward for one in rows]),
        unit_B=torch.tensor([index for index, unit in enumerate(units) for _ in unit]),
        n_own_B=torch.tensor([own[one.trajectory] for one in rows]),
    )


def own_tokens(units: Sequence[Unit]) -> Counter[str]:
    """Trajectory -> sampled tokens of it in the step."""
    own: Counter[str] = Counter()
    for unit in units:
        for one in unit:
            own[one.trajectory] += one.n_sampled
    return own


def score(model: Qwen2ForCausalLM, batch: Batch, reference: Qwen2ForCausalLM | None = None) -> Scored:
    """The model's word on a batch, with gradients."""

    def all_of(scorer: Qwen2ForCausalLM) -> tuple[Tensor, Tensor]:
        logps = torch.log_softmax(
            scorer(input_ids=batch.ids_BT).logits[:, :-1] / batch.temperature_B[:, None, None], -1
        )
        chosen = logps.gather(2, batch.ids_BT[:, 1:, None])[..., 0]
        return chosen[batch.select_BT], -(logps.exp() * logps).sum(-1)[batch.select_BT]

    logprobs_N, entropy_N = all_of(model)
    reference_N = None
    if reference is not None:
        with torch.no_grad():
            reference_N = all_of(reference)[0]
    return Scored(logprobs_N, entropy_N, reference_N)


def row_scores(model: Qwen2ForCausalLM, reference: Qwen2ForCausalLM | None, rows: Sequence[Row]) -> list[RowScore]:
    """`Algorithm.begin`'s view of the model."""
    scores = []
    with torch.no_grad():
        for one in rows:
            actions = torch.tensor(one.action_mask[1:])
            own = float(token_logprobs(model, one)[0][actions].sum())
            theirs = None if reference is None else float(token_logprobs(reference, one)[0][actions].sum())
            scores.append(RowScore(own, theirs, one.n_sampled))
    return scores


def whole_of(units: Sequence[Unit], algorithm: Algorithm, constants: Mapping[str, float]) -> Whole:
    """Sizes of a step on `units`."""
    rows = [one for unit in units for one in unit]
    n_tokens = sum(one.n_sampled for one in rows)
    return Whole(
        n_tokens=n_tokens,
        n_rows=len(rows),
        n_trajectories=len(own_tokens(units)),
        n_units=len(units),
        n_selected=sum(len(one) - 1 for one in rows) if algorithm.scores_context else n_tokens,
        constants=constants,
    )


def step(
    model: Qwen2ForCausalLM,
    algorithm: Algorithm,
    units: Sequence[Unit],
    *,
    reference: Qwen2ForCausalLM | None = None,
    n_units: int = 1000,
) -> tuple[dict[str, Tensor], Figures]:
    """(gradients, figures) of one optimiser step in micro-batches of `n_units`; nothing is updated."""
    model.zero_grad()
    constants = algorithm.begin(units, lambda rows: row_scores(model, reference, rows))
    whole = whole_of(units, algorithm, constants)
    own = own_tokens(units)
    total: Counter[str] = Counter()
    for first in range(0, len(units), n_units):
        batch = batch_of(units[first : first + n_units], algorithm, own)
        scored = score(model, batch, reference if Need.reference in algorithm.needs else None)
        loss, figures = algorithm.loss(batch, scored, whole)
        loss.backward()  # type: ignore[no-untyped-call]
        for name, share in figures.items():
            total[name] += share
    return gradients(model), complete(dict(total))
