"""A short training, by itself or under torchrun: what it ends at is written to a file by the first rank.

python -m tests.train.engine.two_ranks FOLDER adapter|all
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from agentloop.train import state
from agentloop.train.algorithms.algorithm import Need
from agentloop.train.distributed import ALONE, Ranks, leave_group
from agentloop.train.engine import Engine, EngineSettings
from agentloop.train.model import Lora, Trainable

from .small import Plain, rows_of, small_model, units_of
from .test_prefixes import family

TIMEOUT = timedelta(minutes=5)


@contextmanager
def ranks() -> Iterator[Ranks]:
    """The ranks that torchrun started; one rank without it."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    rank = int(os.environ["RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=TIMEOUT)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        yield Ranks(rank, size)
    finally:
        leave_group()


def main(folder: Path, what: str) -> None:
    with ranks() as these:
        lora = Lora(2, 4) if what == "adapter" else None
        settings = EngineSettings(learning_rate=1e-2, max_tokens=90)
        engine = Engine(Trainable(small_model(), lora=lora), Plain(Need.reference), settings, ranks=these)
        for seed in range(3):
            rows = [*family(seed), *rows_of([9, 5, 30, 4], seed), replace(rows_of([7], seed + 9)[0], group=None)]
            figures = engine.step(units_of(rows))
        saved = state.checkpoint(engine, folder / "states", {"cursor": 3})
        engine.step(units_of(rows_of([5], 8)))
        assert state.restore(engine, state.checkpoints(folder / "states")[-1]) == {"cursor": 3}
        assert state.checkpoint(engine, folder / "states", {"cursor": 3}) == saved
        engine.step(units_of(rows_of([5], 8)))
        engine.trainable.save(folder)
        scores = np.concatenate([row.old_logprobs for row in engine.score(rows)])
        tensors = engine.trainable.state()
        if these.is_first:
            save_file(tensors, folder / "tensors.safetensors")
            (folder / "figures.json").write_text(json.dumps({**figures, "steps": engine.n_steps}))
            np.save(folder / "scores.npy", scores)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
