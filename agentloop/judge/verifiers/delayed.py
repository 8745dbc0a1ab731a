"""The verifier whose number arrives hours later: whether a reply came, a patch was merged, a customer stayed."""

from __future__ import annotations

from agentloop.errors import NotYet
from agentloop.protocols import Sandbox
from agentloop.types import Trace


class Delayed:
    """Waits for `PUT /api/v1/traces/ID/scores/delayed` (or the name that `as` gave it).

    Until then the reward is `unscored: waiting`; the number that arrives is combined with the others' as if it had
    been there from the start.
    """

    name = "delayed"
    version = "1"
    waits = True

    def __init__(self, outcome: str) -> None:
        self.outcome = outcome

    async def score(self, trace: Trace, sandbox: Sandbox | None) -> float:
        """Never a number of its own."""
        raise NotYet(self.outcome)
