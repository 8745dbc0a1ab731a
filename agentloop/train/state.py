"""Everything that a training needs to continue as if it had never stopped: weights, optimiser moments, and progress.

    FOLDER/
      model.safetensors        trained tensors in their training precision (fp32 even if bf16 is published)
      optimizer.safetensors    INDEX.KEY -> moments
      shards/                  both of these, if all weights are sharded over ranks
      progress.json            updates so far, and the trainer's own progress (curriculum, cursor)

A trainer writes checkpoints within a turn (`checkpoint`), and a state to continue from next to each version (`save`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from agentloop.errors import TrainingError
from agentloop.output_files import make_folder
from agentloop.registry.artifacts import OPTIMIZER, weights_hash
from agentloop.registry.folders import draft_of, replacing
from agentloop.train.distributed import like
from agentloop.train.engine import Engine
from agentloop.train.shards import load_shards, save_shards
from agentloop.types import content_hash

MODEL = "model.safetensors"
SHARDS = "shards"
PROGRESS = "progress.json"
KEPT = 2
"""Number of checkpoints to keep: the last, and the one to return to if the last is bad."""


def save(engine: Engine, folder: Path, progress: Mapping[str, Any], *, weights: bool = True) -> str:
    """Write the state to `folder`; returns its sha256, which is equal for equal states on the same number of ranks.

    progress: JSON. weights=False omits the weights, for a folder next to a version's weights in fp32; sharded weights
    are always written. Raises TrainingError if the disk does not take it.
    """
    with engine.ranks.together("save", folder, progress, weights=weights), _disk(folder):
        own = {"steps": engine.n_steps, "skipped": engine.n_skipped, "progress": dict(progress)}
        if engine.ranks.is_first:
            make_folder(folder)
            (folder / PROGRESS).write_text(json.dumps(own, indent=1, sort_keys=True) + "\n")
        # The other ranks write their shards into the folder that the first one makes.
        engine.ranks.wait()
        if engine.is_sharded:
            return content_hash([own, save_shards(engine.trainable.actor, engine.optimizer, folder / SHARDS)])
        state_hash = ""
        if engine.ranks.is_first:
            if weights:
                save_file(engine.trainable.state(), folder / MODEL)
            save_file(_moments(engine), folder / OPTIMIZER)
            state_hash = weights_hash(folder)
        return engine.ranks.from_first(state_hash)


def restore(engine: Engine, folder: Path) -> dict[str, Any]:
    """Load the state in `folder`; returns the progress saved with it. A broken state changes nothing, except in shards.

    If weights or moments are missing, the engine keeps its own. The state may come from another number of ranks.
    Raises TrainingError for a state that is broken, or of another model.
    """
    with engine.ranks.together("restore", folder):
        try:
            own = json.loads((folder / PROGRESS).read_text())
            steps, skipped, progress = int(own["steps"]), int(own["skipped"]), dict(own["progress"])
            tensors = _read(folder / MODEL)
            moments = _read(folder / OPTIMIZER)
            # Last, because torch loads shards straight into the weights.
            if (folder / SHARDS).is_dir():
                load_shards(engine.trainable.actor, engine.optimizer, folder / SHARDS)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError, CheckpointException) as error:
            raise TrainingError(f"{folder}: no whole state ({error}); remove it, and the one before is used") from error
        if tensors is not None:
            engine.trainable.load_state(tensors)
        if moments is not None:
            _restore(engine, moments)
        engine.n_steps = steps
        engine.n_skipped = skipped
        return progress


def read_progress(folder: Path) -> dict[str, Any]:
    """The trainer's own progress in the state in `folder`. Raises TrainingError for a broken state."""
    try:
        return dict(json.loads((folder / PROGRESS).read_text())["progress"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{folder}: no whole state ({error}); remove it, and the one before is used") from error


def checkpoint(engine: Engine, folder: Path, progress: Mapping[str, Any], *, good: int | None = None) -> str:
    """Save a state next to those in `folder`, atomically, and remove all but the last two; returns its sha256.

    good: number of optimiser steps up to which nothing is in doubt. If it is set, the newest checkpoint of at most
    `good` steps is kept instead of the last but one.
    """
    with engine.ranks.together("checkpoint", folder, progress, good=good):
        place = folder / f"{engine.n_steps:08d}"
        ranks = engine.ranks
        with _disk(folder):
            with ExitStack() as stack:
                if ranks.is_first:
                    make_folder(folder)
                    stack.enter_context(replacing(place))
                # The draft must exist before any rank writes into it.
                ranks.wait()
                state_hash = save(engine, draft_of(place), progress)
                # All ranks must have written before the first one renames it.
                ranks.wait()
            # It must be in place before any rank reads or replaces it.
            ranks.wait()
        if ranks.is_first:
            # Removed after the rename, so that a kill leaves one checkpoint too many, never none.
            *older, _ = checkpoints(folder)
            survivors = older[1 - KEPT :]
            if good is not None:
                survivors = [path for path in older if int(path.name) <= good][-1:]
            for old in older:
                if old not in survivors:
                    shutil.rmtree(old, ignore_errors=True)
        return state_hash


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name.isdecimal())


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"{folder}: the state cannot be written ({error}); free the disk, and start again"
        ) from error


def _read(path: Path) -> dict[str, Tensor] | None:
    return load_file(path) if path.is_file() else None


def _moments(engine: Engine) -> dict[str, Tensor]:
    """`INDEX.KEY` -> tensor of the optimiser's state; Adam's step counts are tensors, too."""
    state = engine.optimizer.state_dict()["state"]
    return {
        f"{index}.{key}": value.detach().to("cpu", copy=True).contiguous()
        for index, values in state.items()
        for key, value in values.items()
    }


def _restore(engine: Engine, moments: Mapping[str, Tensor]) -> None:
    whole = engine.optimizer.state_dict()
    parameters = [value for _, value in engine.trainable.parameters()]
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in moments.items():
        index, key = name.split(".", 1)
        # Step counts are scalars, which every rank has whole.
        state.setdefault(int(index), {})[key] = value if value.dim() == 0 else like(value, parameters[int(index)])
    engine.optimizer.load_state_dict({**whole, "state": state})
