"""One training on several ranks: each rank computes a share of the rows of every step.

The first process starts the others, and they meet in a store that listens on loopback alone (`followers.py`).

All weights are sharded (FSDP2, `fully_shard`); an adapter is small, so every rank holds all of it (DDP). Every rank
makes the same calls with the same units and computes the same plan. Means are divided by the sizes of the whole step,
so the gradient equals that of a single rank.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from agentloop.errors import TrainingError

Value = TypeVar("Value")
SETTLE_S = 0.2
"""Time that gloo's thread gets to drop the tensors of the last exchange, in seconds; it needs milliseconds."""


def leave_group() -> None:
    """Leave the process group after the last exchange.

    Gloo's thread needs the interpreter's lock to drop the tensors of an exchange. The destructor of a model under DDP
    holds that lock and waits for the thread. A process that ended right after an exchange hung in this way (torch
    2.13), so the thread gets the lock first.
    """
    time.sleep(SETTLE_S)
    dist.destroy_process_group()


class Ranks:
    """This process among the ranks of one training. With one rank, all methods do nothing."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and talks to servers."""
        return self.rank == 0

    def wrap(self, actor: nn.Module, *, is_sharded: bool, dtype: torch.dtype) -> nn.Module:
        """The module to call instead of `actor`. Sharding changes `actor` itself; create optimisers after this call."""
        if self.size == 1:
            return actor
        if not is_sharded:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # the new name would copy buffers once
                return DistributedDataParallel(actor, broadcast_buffers=False)
        shard(actor, dtype)
        return actor

    def together(self, name: str, *arguments: Any, **options: Any) -> AbstractContextManager[None]:
        """A block that every rank runs. In this class each rank reaches it by itself; see `followers.Leader`."""
        return nullcontext()

    def last_only(self, module: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        """A block in which only the last backward pass adds up the gradients over ranks."""
        if is_last or not isinstance(module, DistributedDataParallel):
            return nullcontext()
        return module.no_sync()

    def check(self, n_own: int, n_whole: int) -> None:
        """Raise TrainingError unless the ranks' own tokens add up to the whole step's: their units differ then."""
        if self.size == 1:
            return
        total = torch.tensor([n_own])
        dist.all_reduce(total, group=_host_group())
        if int(total) != n_whole:
            raise TrainingError(
                f"the ranks have {int(total)} tokens of a step with {n_whole}; give every rank the same units"
            )

    def added(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Sums of figures over ranks."""
        total: Counter[str] = Counter()
        for share in self.gathered(dict(figures)):
            total.update(share)
        return dict(total)

    def gathered(self, value: Value) -> list[Value]:
        """The values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=_host_group())
        return values

    def wait(self) -> None:
        """Wait until all ranks have made this call."""
        self.gathered(None)

    def from_first(self, value: Value) -> Value:
        """The first rank's value, such as the units that it rolled out."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=_host_group())
        return values[0]


ALONE = Ranks()


def shard(actor: nn.Module, dtype: torch.dtype) -> None:
    """Shard each layer separately, and the remaining parameters together."""
    device = next(actor.parameters()).device
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        # A sum over ranks in bf16, which keeps 8 bits, would lose small gradients.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # Layers first: the last call takes the parameters that no earlier one has taken.
    for layer in _layers(actor):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(actor, mesh=mesh, mp_policy=policy)


def reshard(actor: nn.Module) -> None:
    """Let a sharded module hold its shards alone.

    After a forward pass without a backward pass, the outermost parameters are whole. Values written into them are lost.
    """
    for module in actor.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(value: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded. Every rank must make this call."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value


def like(value: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, sharded like `other`."""
    if isinstance(other, DTensor):
        return distribute_tensor(value.to(other.device), other.device_mesh, other.placements)
    return value


def _layers(actor: nn.Module) -> Sequence[nn.Module]:
    """The longest list of modules, which contains a model's decoder layers."""
    lists = [module for module in actor.modules() if isinstance(module, nn.ModuleList)]
    return max((list(modules) for modules in lists), key=len, default=[])


def _host_group() -> Any:
    """The group for objects and counts, which travel through host memory."""
    return dist.group.WORLD
