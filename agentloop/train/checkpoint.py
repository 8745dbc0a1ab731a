"""A policy version on disk: a folder that is there whole or not at all.

`weights/` is what the version *is*; its hash is the version's. `trainer/` is what training needs to
go on from it as if it had never stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentloop.policies.tiny import TinyPolicy

WEIGHTS, TRAINER = "weights", "trainer"


def save_version(
    folder: Path, policy: TinyPolicy, optimizer: torch.optim.Optimizer | None, rates: Mapping[str, float]
) -> str:
    """Write a version to `folder` and return the SHA-256 of its weights folder.

    Written beside it, flushed and renamed, so a crash leaves the old state or the new one. A folder
    that is already there is an interrupted run's and is replaced.
    """
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    (draft / TRAINER).mkdir(parents=True)
    policy.save(draft / WEIGHTS)
    (draft / TRAINER / "curriculum.json").write_text(json.dumps(dict(rates), indent=1))
    if optimizer is not None:
        save_file(_moments(optimizer), draft / TRAINER / "optimizer.safetensors")
    for path in sorted(draft.rglob("*")):
        _flush(path)
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
    _flush(folder.parent)
    return folder_hash(folder / WEIGHTS)


def load_trainer(folder: Path, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Restore the optimizer's moments when there are any; returns the curriculum's rates."""
    moments = folder / TRAINER / "optimizer.safetensors"
    if moments.is_file():
        _restore(optimizer, load_file(moments))
    rates: dict[str, float] = json.loads((folder / TRAINER / "curriculum.json").read_text())
    return rates


def folder_hash(folder: Path) -> str:
    """SHA-256 over names and contents of the files in `folder`, in name order."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


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
