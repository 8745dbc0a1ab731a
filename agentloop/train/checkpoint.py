"""Weights of ours on disk, and what training needs to continue from them as if it had never stopped.

The folder of a version (`registry/folders.py`) gets both. Training that has made no version yet saves its progress in a
folder that is there whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from agentloop.policies.tiny import TinyPolicy
from agentloop.registry.artifacts import WEIGHTS
from agentloop.registry.folders import replacing

TRAINER = "trainer"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
PROGRESS = "progress.json"


def save_version(
    folder: Path, policy: TinyPolicy, optimizer: torch.optim.Optimizer | None, rates: Mapping[str, float]
) -> None:
    """Write weights, and what training needs to go on from them, to the folder of a version that is being made."""
    (folder / TRAINER).mkdir(parents=True)
    policy.save(folder / WEIGHTS)
    (folder / TRAINER / "curriculum.json").write_text(json.dumps(dict(rates), indent=1))
    if optimizer is not None:
        save_file(_moments(optimizer), folder / TRAINER / OPTIMIZER)


def save_progress(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Mapping[str, object]
) -> None:
    """Replace what `folder` has with the weights, the optimizer's moments and `progress`, which is JSON."""
    with replacing(folder) as draft:
        save_file({key: value.contiguous() for key, value in model.state_dict().items()}, draft / MODEL)
        save_file(_moments(optimizer), draft / OPTIMIZER)
        (draft / PROGRESS).write_text(json.dumps(dict(progress)))


def read_progress(folder: Path) -> dict[str, Any] | None:
    """What `save_progress` was given last; None where it never finished."""
    path = folder / PROGRESS
    if not path.is_file():
        return None
    progress: dict[str, Any] = json.loads(path.read_text())
    return progress


def restore_progress(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the saved weights and moments in place."""
    model.load_state_dict(load_file(folder / MODEL))
    _restore(optimizer, load_file(folder / OPTIMIZER))


def load_trainer(folder: Path, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Restore the optimizer's moments when there are any; returns the curriculum's rates."""
    moments = folder / TRAINER / OPTIMIZER
    if moments.is_file():
        _restore(optimizer, load_file(moments))
    rates: dict[str, float] = json.loads((folder / TRAINER / "curriculum.json").read_text())
    return rates


def _moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`INDEX.KEY` -> tensor of the optimizer's state; Adam's step counts are tensors, too."""
    state = optimizer.state_dict()["state"]
    return {f"{i}.{key}": value.contiguous() for i, values in state.items() for key, value in values.items()}


def _restore(optimizer: torch.optim.Optimizer, moments: Mapping[str, Tensor]) -> None:
    whole = optimizer.state_dict()
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in moments.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({**whole, "state": state})
