"""The demo's loop for two seeds, gated and trained: the printed table, hashes, counts and rewards; see `demo.py`."""

from __future__ import annotations

import pytest
from conftest import need

from .commands import masked
from .compare import assert_same, read
from .demo import PIN, SEEDS, SKILLS, arithmetic, lineage, play

pytestmark = pytest.mark.slow


@pytest.mark.first(seed=1)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("way", SKILLS)
def test_the_demos_table_and_versions_are_the_pin(way: str, seed: int) -> None:
    need("bubblewrap")
    pins = read(PIN)
    pin = pins[way][str(seed)]
    result = masked(pin, play(way, seed))
    if way == "trained" and pins["arithmetic"] != arithmetic():
        assert lineage(result) == lineage(pin)
        return
    assert_same(pin, result, f"the demo's loop with seed {seed}, {way},")
