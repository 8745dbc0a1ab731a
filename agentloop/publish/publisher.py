"""What a publisher is: it brings what was trained to a server, and refuses where that does not answer as trained."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from agentloop.publish.probe import Probe


class Published(NamedTuple):
    """What was published, and how the check went."""

    model: str
    """Its name at the server."""
    seconds: float
    """To load, check and announce it."""
    worst: float
    """Largest difference in nats between torch and the server over the probe's tokens."""
    apart: float
    """Largest difference in nats between this and its parent there: what the check could have told apart."""
    is_proven: bool
    """Whether `apart` is large enough that an answer of the parent would have been refused."""


class Publisher(Protocol):
    """Brings what was trained to where it is asked, and proves that it answers there."""

    name: str

    async def publish(self, name: str, folder: Path, probe: Probe) -> Published:
        """Serve the adapter or model in `folder` as `name`, which is new.

        Raises PublishError where it cannot be served or does not answer as `probe` says; the server then has what it
        had before.
        """
        ...

    async def retract(self, name: str) -> None:
        """Free the slot of `name`, once nobody asks it any more. A name that is not served is not an error."""
        ...
