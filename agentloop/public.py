"""Packages that are functions of the public API, too: `al.gate(...)` and `agentloop.gate` share a name."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """A package that can be called, as the function `_target` names: `module:function`."""

    _target: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See the function."""
        return self._function(*args, **kwargs)

    @property
    def _function(self) -> Any:
        module, _, name = self._target.partition(":")
        return getattr(import_module(module), name)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function)


def make_callable(package: str, target: str) -> None:
    """Let a call of `package` be one of `target`, which is imported then: it is in a layer above."""
    module = sys.modules[package]
    module.__class__ = CallablePackage
    module._target = target  # type: ignore[attr-defined]
