"""The verifier for answers that can be written down: equal text or nothing."""

from __future__ import annotations

from agentloop.judge.verifiers.mismatch import unlike
from agentloop.protocols import Sandbox
from agentloop.types import Graded, Trace


class Exact:
    """1.0 when the submitted answer equals `expected` after trimming outer whitespace, else 0.0.

    Reads only `trace.answer`, so nothing that the agent printed or left in its box can move it.
    No case folding, no Unicode folding, no search inside a longer answer: each would be a way in.
    """

    name = "exact"
    version = "1"

    def __init__(self, expected: str) -> None:
        self.expected = expected.strip()

    async def score(self, trace: Trace, sandbox: Sandbox | None) -> Graded:
        """0.0 when nothing was submitted, whatever is expected; a 0.0 names both texts."""
        if trace.answer is not None and trace.answer.strip() == self.expected:
            return Graded(value=1.0)
        return unlike(repr(self.expected), trace.answer)
