"""The demo's loop for two seeds, gated and trained: the printed table, hashes, counts and rewards; see `demo.py`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from conftest import need

from .commands import masked
from .compare import assert_same, read
from .demo import PIN, SEEDS, SKILLS, arithmetic, lineage, play

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("default:the trained pin")
@pytest.mark.first(seed=1)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("way", SKILLS)
def test_the_demos_table_and_versions_are_the_pin(way: str, seed: int) -> None:
    need("bubblewrap")
    pins = read(PIN)
    pin = pins[way][str(seed)]
    result = masked(pin, play(way, seed))
    if way == "trained" and has_other_arithmetic(pins):
        assert lineage(result) == lineage(pin)
        return
    assert_same(pin, result, f"the demo's loop with seed {seed}, {way},")


def has_other_arithmetic(pins: dict[str, Any]) -> bool:
    """True, with a warning, on a machine whose floats are not those of the pin: only the lineage can be compared."""
    if pins["arithmetic"] == arithmetic():
        return False
    warnings.warn("the trained pin: this machine computes other floats, so the lineage alone is compared", stacklevel=2)
    return True


def test_other_arithmetic_is_reported() -> None:
    assert not has_other_arithmetic({"arithmetic": arithmetic()})
    with pytest.warns(UserWarning, match="the lineage alone is compared"):
        assert has_other_arithmetic({"arithmetic": None})
