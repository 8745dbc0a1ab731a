"""The registry as the gateway reads it: how each version is asked, which is live, and the canary's share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentloop.gateway.routes import Served, Serving, version_model
from agentloop.registry.versions import Registry
from agentloop.types import Move, PolicyState, PolicyVersion


def as_weights(version: PolicyVersion) -> Served:
    """A version that the upstream with `serves_versions` has under its own name."""
    return Served(version.number, version_model(version.number))


def serving_of(
    registry: Registry, served: Callable[[PolicyVersion], Served | None] = as_weights
) -> Callable[[], Serving]:
    """For `Routes`. served: how a version is asked; None for one that the gateway cannot ask."""
    asked: dict[int, Served] = {}

    def read() -> Serving:
        versions = registry.all()
        for version in versions:
            how = asked.get(version.number) or served(version)
            if how is not None:
                asked[version.number] = how
        live = next((version.number for version in versions if version.state is PolicyState.live), None)
        canary = next((version.number for version in versions if version.state is PolicyState.canary), None)
        if canary is None:
            return Serving(dict(asked), live)
        return Serving(dict(asked), live, canary, *_draw(canary, registry.moves(canary)))

    return read


def _draw(canary: int, moves: Sequence[Move]) -> tuple[float, str, bool]:
    """(share, salt, whether it is a shadow) of a canary. The salt stays, so a growing share keeps its episodes."""
    began = next(i for i in reversed(range(len(moves))) if _begins(moves[i]))
    share = next((move.share for move in reversed(moves[began:]) if move.share is not None), 0.0)
    return share, f"{canary} {moves[began].at.isoformat()}", moves[began].is_shadow


def _begins(move: Move) -> bool:
    return move.after is PolicyState.canary and move.before is not PolicyState.canary
