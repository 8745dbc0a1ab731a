"""Saves and loads weights and moments that are sharded over ranks: each rank writes and reads its own.

A state from one number of ranks can be loaded by another number.
"""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from agentloop.types import content_hash


def save_shards(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> str:
    """Writes weights and moments. Returns a hash of all ranks' shards. Every rank must call it."""
    state = _state(module, optimizer)
    save(state, checkpoint_id=str(folder))
    digest = hashlib.sha256()
    for name, value in state["model"].items():
        _add(digest, name, value)
    for name, moments in state["optimizer"]["state"].items():
        for key, value in moments.items():
            _add(digest, f"{name} {key}", value)
    hashes: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hashes, digest.hexdigest())
    return content_hash(hashes)


def load_shards(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Loads weights and moments in place, on any number of ranks. Every rank must call it."""
    state = _state(module, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process is meant
        load(state, checkpoint_id=str(folder), no_dist=not dist.is_initialized())
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    is_new = not optimizer.state
    weights, moments = get_state_dict(module, optimizer)
    if is_new:  # torch makes moments by a step that changes nothing and must not count
        entries: Any = moments["state"]
        for values in (*optimizer.state.values(), *entries.values()):
            values["step"].zero_()
    return {"model": weights, "optimizer": moments}


def _add(digest: hashlib._Hash, name: str, value: object) -> None:
    if isinstance(value, Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        digest.update(f"{name} {local.dtype} {tuple(local.shape)}".encode())
        # numpy has no bfloat16, so the bytes are hashed.
        digest.update(local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
