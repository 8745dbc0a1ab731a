"""Texts that an agent reads -> components that can be rewritten, and the overlay that puts new texts in their place.

The texts come from the parent's overlay, from traces (a program's requests show its prompt and its tools), or from
experience that can show them. A text that differs between tasks is no component.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentloop.errors import ConfigError
from agentloop.types import Component, Lesson, Overlay, Trace
from agentloop.types.overlay import INSTRUCTIONS, TOOL

OVERLAY = "overlay.json"
"""The file in the folder of a version."""
INSTRUCTS = ("system", "developer")


def read_overlay(folder: Path) -> Overlay:
    """The overlay of the version in `folder`; an empty one for a version without. Raises ConfigError."""
    path = folder / OVERLAY
    if not path.is_file():
        return Overlay()
    try:
        return Overlay.model_validate_json(path.read_bytes())
    except ValueError as error:
        raise ConfigError(
            f"{path}: not an overlay ({error}); restore the file, or go on from another version"
        ) from None


def components_of(
    traces: Iterable[Trace], parent: Overlay, visible: Sequence[Component] = (), *, tools: bool = True
) -> dict[str, Component]:
    """Name -> component as it stands now. visible: in place of what traces show. tools: tool descriptions, too."""
    components = {each.name: each for each in (*(visible or _seen(traces)), *parent.components)}
    if not any(name.partition(".")[0] == INSTRUCTIONS for name in components):
        components[INSTRUCTIONS] = Component(name=INSTRUCTIONS, text="")
    return {name: each for name, each in sorted(components.items()) if tools or not name.startswith(TOOL)}


def overlay_of(
    texts: Mapping[str, str], components: Mapping[str, Component], parent: Overlay, lessons: Sequence[Lesson] = ()
) -> Overlay:
    """What an agent reads that has `texts`, by component, and the lessons of `parent` with further ones."""
    changed: list[Component] = []
    for name, component in components.items():
        text = texts.get(name, component.text)
        if text != component.original:
            changed.append(component.model_copy(update={"text": text}))
    return parent.model_copy(update={"components": tuple(changed), "lessons": (*parent.lessons, *lessons)})


def _seen(traces: Iterable[Trace]) -> list[Component]:
    """What every one of `traces` shows with the same words."""
    texts: dict[str, set[str]] = {}
    for trace in traces:
        prompt = next((message.content for message in trace.messages if message.role in INSTRUCTS), None)
        if prompt is not None:
            texts.setdefault(INSTRUCTIONS, set()).add(prompt)
        for step in trace.steps[:1]:
            for tool in step.tools:
                name, description = _described(tool)
                texts.setdefault(f"{TOOL}{name}", set()).add(description)
    same = {name: words.pop() for name, words in texts.items() if len(words) == 1}
    return [Component(name=name, original=text, text=text) for name, text in same.items() if name != TOOL]


def _described(tool: Mapping[str, Any]) -> tuple[str, str]:
    """Name and description of a tool as a request has it, in any dialect."""
    inner = tool.get("function")
    definition = inner if isinstance(inner, dict) else tool
    return str(definition.get("name") or ""), str(definition.get("description") or "")
