"""Parts by name: installed entry points, `module:Class`, or `path/to/file.py:Class`.

Built-in parts use the same entry-point groups as everyone's. A part's options are the keyword
arguments of its constructor. Nothing is loaded before it is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from agentloop.errors import PluginError, boundary, did_you_mean, extra


def load_part(group: str, kind: str, options: Mapping[str, Any] | None = None, *, base: Path | None = None) -> Any:
    """The part `kind` of `agentloop.<group>`, made with `options`.

    base: folder that a relative `file.py:Class` starts from; the current one when left out.
    Raises PluginError for a kind that is not there and for options its constructor does not take or refuses.
    """
    make = load_object(group, kind, base=base)
    given = dict(options or {})
    with boundary(PluginError, f"{group} {kind!r} cannot be called"):
        signature = inspect.signature(make)
    try:
        signature.bind(**given)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "none"
        raise PluginError(
            f"{group} {kind!r}: {error} (options: {takes}; given: {', '.join(given) or 'none'})"
        ) from None
    with boundary(PluginError, f"{group} {kind!r} refuses its options"):  # whose values are not shown: some are secrets
        return make(**given)


def load_object(group: str, kind: str, *, base: Path | None = None) -> Callable[..., Any]:
    """The class or function behind `kind`, not yet called. Raises PluginError."""
    if ":" in kind:
        return _from_path(group, kind, base or Path())
    found = installed(group)
    if kind not in found:
        hint = did_you_mean(kind, found) or "; a part of your own is named `file.py:Class`"
        raise PluginError(f"no {group} {kind!r} (installed: {', '.join(sorted(found)) or 'none'}){hint}")
    try:
        loaded: Callable[..., Any] = found[kind].load()
    except (ImportError, AttributeError) as error:
        raise PluginError(f"{group} {kind!r} cannot be loaded: {error}{_extra(error)}") from error
    return loaded


def installed(group: str) -> dict[str, EntryPoint]:
    """Entry points of `agentloop.<group>` by name."""
    return {point.name: point for point in entry_points(group=f"agentloop.{group}")}


def _from_path(group: str, kind: str, base: Path) -> Callable[..., Any]:
    source, name = kind.rsplit(":", 1)
    with boundary(PluginError, f"{group} {kind!r} cannot be loaded (name it `file.py:Class` or `module:Class`)"):
        module = _file_module(base / source) if source.endswith(".py") else importlib.import_module(source)
    if not hasattr(module, name):
        own = [n for n, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        there = ", ".join(own) or "nothing"
        raise PluginError(
            f"{group} {kind!r}: no {name!r} in {Path(source).name} (defined there: {there}){did_you_mean(name, own)}"
        )
    loaded: Callable[..., Any] = getattr(module, name)
    return loaded


def _file_module(path: Path) -> ModuleType:
    """The file as a module of its own, entered in `sys.modules` because dataclasses and pickle look there."""
    name = f"agentloop_part_{path.stem}_{zlib.crc32(str(path.resolve()).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _extra(error: Exception) -> str:
    missing = getattr(error, "name", None) or ""
    if missing.split(".")[0] in {"torch", "transformers", "tokenizers", "safetensors"}:
        return f"; {extra('train')}"
    if missing.split(".")[0] in {"google", "opentelemetry"}:
        return f"; {extra('serve')}"
    return ""
