"""Faults of a trained adapter between the trainer and the server, for `publish.py`: each breaks a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
Tensors = dict[str, Tensor]
Change = Callable[[Tensors, Tensors], Tensors]
"""(tensors, those of the parent) -> broken tensors."""


def tensors(change: Change) -> Callable[[Path, Path], None]:
    """Breaks the tensors in a folder. The other folder is the parent's."""

    def broken(folder: Path, parent: Path) -> None:
        changed = change(load_file(folder / TENSORS), load_file(parent / TENSORS))
        save_file({name: value.contiguous() for name, value in changed.items()}, folder / TENSORS)

    return broken


def settings(**values: Any) -> Callable[[Path, Path], None]:
    """Breaks the settings in a folder."""

    def broken(folder: Path, parent: Path) -> None:
        config = json.loads((folder / CONFIG).read_bytes())
        (folder / CONFIG).write_text(json.dumps(config | values))

    return broken


def mapped(part: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Changes the tensors whose names contain `part`."""
    return lambda own, parent: {name: change(value) if part in name else value for name, value in own.items()}


def swapped(own: Tensors, parent: Tensors) -> Tensors:
    """A and B of the square modules change places."""
    changed = dict(own)
    for name in own:
        other = name.replace("lora_A", "lora_B")
        if other != name and own[name].shape[1] == own[other].shape[0]:
            changed[name] = own[other].T
            changed[other] = own[name].T
    return changed


def renamed(own: Tensors, parent: Tensors) -> Tensors:
    """The update of one square module is written under the name of another."""
    pairs = {"q_proj": "o_proj", "o_proj": "q_proj"}
    changed = {}
    for name, value in own.items():
        module = next((each for each in pairs if each in name), None)
        changed[name if module is None else name.replace(module, pairs[module])] = value
    return changed


def shuffled(value: Tensor) -> Tensor:
    return value[torch.randperm(len(value), generator=torch.Generator().manual_seed(0))]


def stale(folder: Path, parent: Path) -> None:
    (folder / TENSORS).write_bytes((parent / TENSORS).read_bytes())


def cut(folder: Path, parent: Path) -> None:
    """The upper half of the ranks alone, at the same scale."""
    config = json.loads((folder / CONFIG).read_bytes())
    rank = config["r"] // 2
    own = load_file(folder / TENSORS)
    halves = {name: value[:rank] if "lora_A" in name else value[:, :rank] for name, value in own.items()}
    save_file({name: value.contiguous() for name, value in halves.items()}, folder / TENSORS)
    settings(r=rank, lora_alpha=config["lora_alpha"] * rank / config["r"])(folder, parent)


def truncated(folder: Path, parent: Path) -> None:
    content = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(content[: len(content) // 2])


def emptied(folder: Path, parent: Path) -> None:
    rmtree(folder)
    folder.mkdir()


def broken_folders(rank: int, alpha: int) -> Mapping[str, Callable[[Path, Path], None]]:
    """Name of each fault that is in the folder of an adapter of that rank and alpha -> what makes it."""
    first, second = "layers.0.", "layers.1."
    return {
        "stale file": stale,
        "wrong alpha": settings(lora_alpha=alpha * 2),
        "wrong rank in config": settings(r=rank * 2),
        "A and B swapped": tensors(swapped),
        "missing layer": tensors(lambda own, parent: {name: own[name] for name in own if second not in name}),
        "one layer from the parent": tensors(
            lambda own, parent: {name: (parent if first in name else own)[name] for name in own}
        ),
        "wrong target module": tensors(renamed),
        "zeroed tensors": tensors(mapped("lora_B", torch.zeros_like)),
        "cut rank": cut,
        "transposed tensor": tensors(mapped("lora_B", lambda value: value.T.reshape(value.shape))),
        "shuffled rows": tensors(mapped("lora_B", shuffled)),
        "scaled by 1.01": tensors(mapped("lora_B", lambda value: value * 1.01)),
        "bfloat16 for float32": tensors(mapped("", lambda value: value.bfloat16().float())),
        "NaN inside": tensors(mapped("layers.0.self_attn.q_proj.lora_B", lambda value: value * torch.nan)),
        "truncated file": truncated,
        "empty folder": emptied,
    }
