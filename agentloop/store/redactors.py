"""Redactors of other packages: the entry points of `agentloop.redactors`. An installed one is on.

Each is a class without arguments that has `text(self, text) -> str`. It gets every text after the built-in rules, and
gives it back without what only you know to be a secret: customer numbers, names, addresses.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol, runtime_checkable

from agentloop.errors import PluginError, boundary
from agentloop.plugins import installed, label, load_part

GROUP = "redactors"


@runtime_checkable
class TextRedactor(Protocol):
    """Takes secrets out of a text."""

    def text(self, text: str) -> str:
        """`text` without secrets. A text that it has cleaned comes back as it is."""
        ...


class OutsideRedactor:
    """A redactor of another package, blamed by its name for whatever it raises: what it fails on is not stored."""

    def __init__(self, name: str) -> None:
        """Raises PluginError for what cannot be loaded, and for what is no redactor."""
        self._name = label(GROUP, name)
        redactor = load_part(GROUP, name)
        if not isinstance(redactor, TextRedactor):
            raise PluginError(f"{self._name} is no redactor; give it `def text(self, text)`")
        self._redactor = redactor

    def text(self, text: str) -> str:
        """See `TextRedactor`. Raises PluginError for whatever it raises, and for what is no text."""
        with boundary(PluginError, f"{self._name} failed"):
            clean = self._redactor.text(text)
        if not isinstance(clean, str):
            raise PluginError(f"{self._name} gave a {type(clean).__name__}; it must give a text")
        return clean


@cache
def outside_redactors() -> tuple[OutsideRedactor, ...]:
    """Those that are installed, by name.

    Raises PluginError for one that cannot be loaded: without it, secrets would be stored.
    """
    return tuple(OutsideRedactor(name) for name in sorted(installed(GROUP)))
