"""Values made from fields that somebody else wrote, and the FormatError when they cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from pydantic import ValidationError

from agentloop.errors import FormatError
from agentloop.formats.fields import Fields
from agentloop.protocols import Records
from agentloop.types import Frozen, Imported, Message, Score

LARGEST = 1.7e308
"""Beyond it a number is infinite, which JSON can say as 1e400."""
Made = TypeVar("Made", bound=Frozen)


def read_each(source: Records, read: Callable[[Fields, Any], Imported]) -> Iterator[Imported | FormatError]:
    """What `read` makes of each record and its fields, or the FormatError of one that is broken."""
    for where, record in source.records():
        yield record if isinstance(record, FormatError) else read_one(where, record, read)


def read_one(where: str, record: Any, read: Callable[[Fields, Any], Imported]) -> Imported | FormatError:
    """As `read_each`, of one record."""
    try:
        return read(Fields(record, where), record)
    except FormatError as error:
        return error
    except RecursionError:
        return FormatError(f"{where}: nested too deeply")
    except ValidationError as error:
        return FormatError(f"{where}: {_first(error)}")


def make(model: type[Made], where: str, known: dict[str, Any], own: object = None) -> Made:
    """A `model` of `known`, and over that of `own`, an object that a file brought along. Raises FormatError."""
    if own is not None and not isinstance(own, dict):
        raise FormatError(f"{where}: {type(own).__name__} where an object with fields of {model.__name__} should be")
    try:
        return model.model_validate({**known, **(own or {})})
    except ValidationError as error:
        raise FormatError(f"{where}: {_first(error)}") from None


def numbers(fields: Fields, key: str) -> tuple[Any, ...]:
    """A list of numbers, such as token ids or log-probabilities. Raises FormatError for any other item."""
    items = fields.items(key)
    for n, item in enumerate(items):
        if isinstance(item, bool) or not isinstance(item, int | float) or not -LARGEST <= item <= LARGEST:
            raise FormatError(f"{fields.where}: {key}[{n}]: {str(item)[:40]!r} where a number should be")
    return tuple(items)


def whole_numbers(fields: Fields, key: str) -> tuple[int, ...]:
    """As `numbers`, without fractions."""
    found = numbers(fields, key)
    for n, item in enumerate(found):
        if item != item // 1:
            raise FormatError(f"{fields.where}: {key}[{n}]: {item} where a whole number should be")
    return tuple(int(item) for item in found)


def scores(fields: Fields | None, source: str, names: Iterable[str]) -> tuple[Score, ...]:
    """Those fields that hold true, false or a number in [0, 1]; others stay, because a Score cannot hold them."""
    made = []
    for name in names if fields else ():
        value = fields.peek(name) if fields else None
        if isinstance(value, int | float) and 0 <= value <= 1 and fields:
            made.append(Score(verifier=f"{source}:{name}", version="1", value=float(fields.take(name))))
    return tuple(made)


def keep_unheard(fields: Fields, messages: Iterable[Message]) -> None:
    """What was said after the last answer: no step heard it, so it is kept beside the trace."""
    fields.keep("unheard", [message.model_dump(mode="json", exclude_defaults=True) for message in messages])


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
