"""A JSON document -> its structure: keys and the types of values."""

from __future__ import annotations

from typing import Any

TYPES = {"str": "string", "int": "number", "float": "number", "bool": "boolean", "NoneType": "null"}


def shape(document: Any) -> Any:
    """Each value as the name of its type; a list as one element that has what any of its elements has."""
    if isinstance(document, dict):
        return {key: shape(value) for key, value in document.items()}
    if isinstance(document, list):
        shapes = [shape(value) for value in document]
        merged: list[Any] = [union(shapes)] if shapes else []
        return merged
    return TYPES[type(document).__name__]


def union(shapes: list[Any]) -> Any:
    """The shape of values of any of these shapes: `null | number`, and objects with the keys of all."""
    objects = [each for each in shapes if isinstance(each, dict)]
    if objects and len(objects) == len(shapes):
        keys = sorted({key for each in objects for key in each})
        return {key: union([each[key] for each in objects if key in each]) for key in keys}
    lists = [each for each in shapes if isinstance(each, list)]
    if lists and len(lists) == len(shapes):
        elements = [element for each in lists for element in each]
        return [union(elements)] if elements else []
    names = sorted({each if isinstance(each, str) else type(each).__name__ for each in shapes})
    return " | ".join(names)
