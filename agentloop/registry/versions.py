"""Policy versions: who descends from whom, which one is live, and which moves are legal.

```
candidate ──▶ live ──▶ retired
    └───────▶ held ──▶ retired
```
One version is live at a time. A number is never used twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from agentloop.errors import StateError
from agentloop.store.store import Store
from agentloop.types import Action, Decision, PolicyState, PolicyVersion

MOVES: dict[PolicyState, frozenset[PolicyState]] = {
    PolicyState.candidate: frozenset({PolicyState.live, PolicyState.held}),
    PolicyState.live: frozenset({PolicyState.retired}),
    PolicyState.held: frozenset({PolicyState.retired}),
    PolicyState.retired: frozenset(),
}


def moved(version: PolicyVersion, to: PolicyState) -> PolicyVersion:
    """`version` in its new state. Raises StateError, naming both states, when the table has no such move."""
    if to not in MOVES[version.state]:
        raise StateError(f"policy v{version.number} is {version.state} and cannot become {to}")
    return version.model_copy(update={"state": to})


class Registry:
    """The versions of one project."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def all(self) -> list[PolicyVersion]:
        """Every version, oldest first."""
        return self._store.versions()

    def get(self, number: int) -> PolicyVersion | None:
        """By number."""
        return next((v for v in self.all() if v.number == number), None)

    def live(self) -> PolicyVersion | None:
        """The champion; None before the first version."""
        return next((v for v in self.all() if v.state is PolicyState.live), None)

    def newest(self) -> PolicyVersion | None:
        """The version made last, whatever became of it."""
        return max(self.all(), key=lambda v: v.number, default=None)

    def add(
        self,
        *,
        number: int,
        parent: int | None,
        kind: str,
        artifact: str | None,
        sha256: str,
        config_hash: str,
        note: str,
    ) -> PolicyVersion:
        """A new version: live when it is the first, else a candidate. Adding the same again changes nothing."""
        registered = self.get(number)
        if registered:
            if registered.sha256 != sha256:
                raise StateError(f"policy v{number} exists with hash {registered.sha256[:12]}, not {sha256[:12]}")
            return registered
        version = PolicyVersion(
            number=number,
            parent=parent,
            kind=kind,
            artifact=artifact,
            sha256=sha256,
            config_hash=config_hash,
            state=PolicyState.candidate if self.live() else PolicyState.live,
            note=note,
            created_at=datetime.now(UTC),
        )
        self._store.put_version(version)
        return version

    def apply(self, decision: Decision) -> None:
        """Carry out a decision on a candidate: promote it in the champion's place, or hold it."""
        candidate = self.get(decision.candidate)
        champion = self.live()
        if candidate is None:
            raise StateError(f"there is no policy v{decision.candidate} to decide on")
        if decision.action is Action.promote:
            changes = [
                moved(candidate, PolicyState.live),
                *([moved(champion, PolicyState.retired)] if champion else []),
            ]
        else:
            changes = [moved(candidate, PolicyState.held)]
        self._store.put_decision(decision, changes)


def versions_of(registry: Registry) -> Callable[[], Mapping[str, int]]:
    """As the gateway's `Routes` take them: numbers in words, the oldest first, after `live`."""

    def read() -> Mapping[str, int]:
        live = registry.live()
        by_name = {PolicyState.live.value: live.number} if live else {}
        return by_name | {str(version.number): version.number for version in registry.all()}

    return read
