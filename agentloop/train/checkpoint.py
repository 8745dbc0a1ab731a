"""A policy version on disk: a folder that is there whole or not at all.

`weights/` is what the version *is*; its hash is the version's. `acting` is the identity of the settings and the agent
under which it acts.
`trainer/` is what training needs to continue from it as if it had never stopped. Training that has made no version yet
saves its progress in a folder of the same care.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from agentloop.output_files import make_folder
from agentloop.policies.tiny import TinyPolicy
from agentloop.registry.artifacts import WEIGHTS, folder_hash

TRAINER = "trainer"
ACTING = "acting"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
PROGRESS = "progress.json"


def save_version(
    folder: Path,
    policy: TinyPolicy,
    optimizer: torch.optim.Optimizer | None,
    rates: Mapping[str, float],
    *,
    acting: str = "",
) -> str:
    """Write a version to `folder` and return the SHA-256 of its weights folder.

    acting: identity of the settings and the agent under which it acts. Written beside `folder`, flushed and renamed, so
    a crash leaves the old state or the new one. A folder that already exists is left from an interrupted run and is
    replaced.
    """
    with _replacing(folder) as draft:
        (draft / TRAINER).mkdir()
        (draft / ACTING).write_text(acting)
        policy.save(draft / WEIGHTS)
        (draft / TRAINER / "curriculum.json").write_text(json.dumps(dict(rates), indent=1))
        if optimizer is not None:
            save_file(_moments(optimizer), draft / TRAINER / OPTIMIZER)
    return folder_hash(folder / WEIGHTS)


def copy_version(source: Path, folder: Path, *, acting: str) -> str:
    """Write the version in `source` to `folder`, to act under other settings or another agent; see `save_version`."""
    with _replacing(folder) as draft:
        shutil.copytree(source, draft, dirs_exist_ok=True)
        (draft / ACTING).write_text(acting)
    return folder_hash(folder / WEIGHTS)


def version_acting(folder: Path) -> str | None:
    """Identity of what the version in `folder` acts under; None for one that was saved without it."""
    path = folder / ACTING
    return (path.read_text() if path.is_file() else "") or None


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """An empty draft folder that takes the place of `folder` when the block ends without an error."""
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    make_folder(draft)
    yield draft
    for path in sorted(draft.rglob("*")):
        _flush(path)
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
    _flush(folder.parent)


def save_progress(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Mapping[str, object]
) -> None:
    """Replace what `folder` has with the weights, the optimizer's moments and `progress`, which is JSON."""
    with _replacing(folder) as draft:
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


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
