"""The versions of a project as `agentloop policies ls|show` print them: what each is made of, its proof, its share."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from agentloop.errors import counted
from agentloop.registry.versions import Registry
from agentloop.store.store import Store
from agentloop.types import Move, PolicyState, PolicyVersion, Proof


class VersionLine(NamedTuple):
    """One version and how it stands."""

    version: PolicyVersion
    share: float | None
    """Of new episodes that ask for the live version; None for a version that gets none."""
    proof: Proof | None
    """The newest one about it."""
    is_override: bool
    """It went live without a proof."""
    since: datetime
    """When it came to its present state or share."""

    @property
    def made_of(self) -> str:
        """In a few words; a version without a lineage has its note."""
        lineage = self.version.lineage
        if lineage is None:
            return self.version.note
        words = [] if self.version.parent is None else [f"v{self.version.parent}"]
        if lineage.n_traces:
            words.append(counted(lineage.n_traces, "trace"))
        return ", ".join([*words, lineage.trainer])

    @property
    def proof_words(self) -> str:
        """The newest proof in a few words, or how it went live without one."""
        if self.proof is not None:
            return short_proof(self.proof)
        return "override" if self.is_override else ""

    def document(self) -> dict[str, Any]:
        """For `--json`: the version's own fields beside these."""
        return {
            **self.version.model_dump(mode="json"),
            "share": self.share,
            "proof": None if self.proof is None else self.proof.model_dump(mode="json"),
            "is_override": self.is_override,
            "since": self.since.isoformat(),
        }


def short_proof(proof: Proof) -> str:
    """`gate PASS: +0.200, not worse, n = 60`."""
    claim = proof.claim.replace("_", " ")
    return f"{proof.kind} {proof.verdict}: {proof.difference:+.3f}, {claim}, n = {proof.n}"


def version_lines(store: Store) -> list[VersionLine]:
    """Every version, the oldest first."""
    registry = Registry(store)
    moves = registry.moves()
    versions = registry.all()
    canary_share = next((_share(moves, v) for v in versions if v.state is PolicyState.canary), 0.0)
    return [_line(registry, version, moves, canary_share) for version in versions]


def version_line(store: Store, ref: str) -> VersionLine:
    """Of the version that `ref` names: `v3`, `3`, `live` or `canary`. Raises StateError where it does not exist."""
    number = Registry(store).named(ref).number
    return next(line for line in version_lines(store) if line.version.number == number)


def _line(registry: Registry, version: PolicyVersion, moves: Sequence[Move], canary_share: float) -> VersionLine:
    own = [move for move in moves if move.version == version.number]
    share = None
    if version.state is PolicyState.live:
        share = 1 - canary_share
    elif version.state is PolicyState.canary:
        share = canary_share
    proofs = registry.proofs(version)
    since = own[-1].at if own else version.created_at
    promotions = [move for move in own if move.after is PolicyState.live and move.before is not None]
    is_override = bool(promotions) and promotions[-1].is_override
    return VersionLine(version, share, proofs[-1] if proofs else None, is_override, since)


def _share(moves: Sequence[Move], version: PolicyVersion) -> float:
    shares = [move.share for move in moves if move.version == version.number and move.share is not None]
    return shares[-1] if shares else 0.0
