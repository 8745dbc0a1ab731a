"""The failure types that a person may name: ours, those of the project's own, and what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agentloop.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from agentloop.store.store import Store


def known_types(project: Path, store: Store) -> list[str]:
    """By name: ours, the project's, and what only traces have."""
    from agentloop.failures.taxonomy import project_taxonomy
    from agentloop.types import FailureType

    ours = (kind.value for kind in FailureType)
    own = (leaf.type.value for leaf in project_taxonomy(project).leaves)
    return list(dict.fromkeys([*ours, *own, *store.values("failure")]))


def check_types(filter: str, types: list[str]) -> None:
    """Raises ConfigError for a `failure` or `label` of a filter that is known nowhere, probably a typo."""
    from agentloop.store.query import parse

    for term in parse(filter):
        names = [term.value] if term.quoted else term.value.split(",")
        for name in names if term.key in ("failure", "label") else ():
            if name and "*" not in name and name not in types:
                raise ConfigError(f"{term.key}: no {name!r} (known: {', '.join(types)}){did_you_mean(name, types)}")
