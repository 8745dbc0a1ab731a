"""Rows, models and a plain algorithm for tests of the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentloop.train.algorithms.algorithm import Batch, Figures, Need, Score, Scored, Whole
from agentloop.train.data.row import Row, Turn, Unit

torch.set_num_threads(1)
N_VOCAB = 23


def small_model(seed: int = 3, layers: int = 2, **settings: object) -> Qwen2ForCausalLM:
    """A model whose distributions are far from uniform, so that wrong targets and temperatures show."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=N_VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    for name, value in settings.items():
        setattr(config, name, value)
    model: Qwen2ForCausalLM = Qwen2ForCausalLM(config).float()
    with torch.no_grad():
        model.lm_head.weight.mul_(20.0)
    return model


def row_of(
    length: int, rng: np.random.Generator, *, name: str = "t", prompt: Sequence[int] = (), temperature: float = 1.0
) -> Row:
    """Random tokens after `prompt`; the second is sampled, the others by chance."""
    ids = np.concatenate([np.array(prompt), rng.integers(1, N_VOCAB, length)]).astype(np.int32)
    mask = rng.random(len(ids)) < 0.6
    mask[: max(1, len(prompt))] = False
    mask[-1] = True
    logprobs = np.where(mask, -rng.uniform(0.5, 4.0, len(ids)), 0.0).astype(np.float32)
    return Row(
        trajectory=name,
        group="g",
        task="task",
        pool="train",
        token_ids=ids,
        action_mask=mask,
        logprobs=logprobs,
        temperature=temperature,
        turns=(Turn(0, len(ids), name, 1, 1),),
        reward=0.5,
    ).with_advantage(float(rng.normal()))


def rows_of(lengths: Sequence[int], seed: int = 0, **options: object) -> list[Row]:
    """One row a length."""
    rng = np.random.default_rng(seed)
    return [row_of(n, rng, name=f"t{index}", **options) for index, n in enumerate(lengths)]  # type: ignore[arg-type]


def units_of(rows: Sequence[Row]) -> list[Unit]:
    return [(row,) for row in rows]


def plain_logprobs(model: torch.nn.Module, row: Row) -> list[float]:
    """Log-probability of each sampled token: one unpadded row, all logits, in float64."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(row.token_ids.astype(np.int64))[None]).logits[0].double()
    logps = (logits / row.temperature).log_softmax(-1)
    return [float(logps[t - 1, row.token_ids[t]]) for t in range(1, len(row)) if row.action_mask[t]]


def seen(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights without key biases: attention does not see them, so Adam scales the rounding of a gradient of 0."""
    return {name: value for name, value in state.items() if not name.endswith("k_proj.bias")}


class Plain:
    """The policy gradient's own loss with a clip-free ratio and an entropy bonus, token mean."""

    name = "plain"

    def __init__(self, *needs: Need, scores_context: bool = False) -> None:
        self.needs = frozenset(needs)
        self.scores_context = scores_context

    def prepare(self, rows: Sequence[Row]) -> tuple[list[Unit], Counter[str]]:
        return units_of(rows), Counter()

    def begin(self, units: Sequence[Unit], score: Score) -> Mapping[str, float]:
        return {}

    def loss(self, batch: Batch, scored: Scored, whole: Whole) -> tuple[Tensor, Figures]:
        assert scored.entropy_N is not None
        ratio_N = (scored.logprobs_N - batch.behaviour_N).exp()
        loss = -(ratio_N * batch.advantage_N + 0.01 * scored.entropy_N).sum() / whole.n_tokens
        if scored.reference_N is not None:
            loss = loss + (scored.logprobs_N - scored.reference_N).square().sum() / whole.n_tokens
        return loss, {"loss": float(loss.detach()), "ratio": float(ratio_N.sum().detach()) / whole.n_tokens}
