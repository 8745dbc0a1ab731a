"""Asking for attempts: which ones (`Ask`), and whoever makes them (`Work`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from agentloop.rollout.actors import Actor
from agentloop.rollout.plan import Planned
from agentloop.types import Attempt


@dataclass(frozen=True)
class Ask:
    """Attempts that are asked for together. Asked for again, only those that are missing are made."""

    stage: str
    """The name under which they are stored."""
    planned: tuple[Planned, ...]
    """Episodes of a group stand side by side."""
    actor: Actor
    first: int = 0
    """Position of the first of `planned` in its stage."""


class Work(Protocol):
    """Makes attempts; `local.py` does it in this process. The asker cannot tell where."""

    def each(self, ask: Ask) -> AsyncIterator[Attempt]:
        """The attempts as they end, each of them on disk.

        Only the first few where these show that no other can succeed: a wrong port, a wrong API key. Raises PluginError
        and ConfigError for a task's own mistake, StoreError when one cannot be stored.
        """
        ...

    async def all(self, ask: Ask) -> list[Attempt]:
        """The same in the order of the plan, whatever ended first."""
        ...
