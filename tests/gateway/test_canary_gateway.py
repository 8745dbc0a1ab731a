"""A small run of `benchmarks/canary_gateway.py`: real processes, and a share that changes under episodes."""

from __future__ import annotations

import pytest

from benchmarks.canary_gateway import run

pytestmark = pytest.mark.slow


@pytest.mark.soak  # twenty seconds; test_canary.py shows the same in one process
def test_moves_while_episodes_run() -> None:
    figures = run(140)
    missed = [one for one in figures["missed"] if not one.startswith("delay of")]  # its seconds are of a quiet machine
    assert missed == []
    assert figures["with_two_versions"] == 0
