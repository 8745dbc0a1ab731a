"""Which tests `first` leaves to `make soak`."""

from __future__ import annotations

import pytest
from conftest import Places

pytest_plugins = ["pytester"]
SOURCE = """
import pytest

@pytest.mark.first(letter=1, sign=1)
@pytest.mark.parametrize(("letter", "word"), [("a", "x"), ("a", "y")])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("sign", "+-")
def test_it(letter, word, number, sign):
    pass
"""


def test_values_are_counted_in_each_parameter_by_itself(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers =\n    first\n")
    places = Places()
    items, _ = pytester.inline_genitems(pytester.makepyfile(SOURCE))
    repeated = {item.name for item in items if places.is_past_first(item)}
    assert repeated == {"test_it[--1-a-y]", "test_it[--2-a-y]"}
