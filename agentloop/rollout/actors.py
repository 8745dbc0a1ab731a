"""An actor is a policy and the agent that asks it: whatever a REF names, and whatever rolls out."""

from __future__ import annotations

from dataclasses import dataclass

from agentloop.costs.totals import Price, free
from agentloop.identity import Identity
from agentloop.protocols import Agent, Policy

ORACLE = "oracle"
NOBODY = "nop"
RANDOM = "random"
"""The actors that every audit tries: each task's own solution, one that does nothing, and random commands."""

SOLUTION = "solution"
"""The actor that mining makes of a task's own solution."""

UNNAMED = Identity("", {})


@dataclass(frozen=True)
class Actor:
    """A policy and the agent that asks it, as a REF names them (`registry/refs.py`)."""

    ref: str
    agent: Agent
    policy: Policy
    identity: Identity = UNNAMED
    """Identity of everything that decides how it acts; see `registry/parts.py`."""
    price: Price = free
    """Price of one of its answers."""
    trained: frozenset[str] = frozenset()
    """Ids of tasks that its weights may have learned from."""
    packages: tuple[str, ...] = ()
    """Installed packages whose versions decide what it does."""
    version: int = 0
    """Number of the registered version that it is; 0 for any other."""

    @property
    def plays_solutions(self) -> bool:
        """It is each task's own solution, which Harbor tasks keep in a file."""
        return self.ref in (ORACLE, SOLUTION)
