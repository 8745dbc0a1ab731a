"""Two ranks are one rank, and rows are dealt out by work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from parts import need_ports
from safetensors.torch import load_file

from agentloop.train.plans import deal, parts_of

from .small import rows_of, seen, units_of
from .two_ranks import main

ROOT = Path(__file__).parents[3]


def run_two(folder: Path, what: str) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [sys.executable, *launcher, "-m", "tests.train.engine.two_ranks", str(folder), what]
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.alone  # two ranks wait for each other without sleeping
@pytest.mark.first(what=1)  # an adapter trains in two processes in `trainers/test_served_turns.py`, too
@pytest.mark.parametrize("what", ["all", "adapter"])
def test_two_ranks_equal_one(tmp_path: Path, what: str) -> None:
    need_ports()
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    main(one, what)
    run_two(two, what)
    expected = load_file(one / "tensors.safetensors")
    tensors = load_file(two / "tensors.safetensors")
    assert expected.keys() == tensors.keys()
    for name, value in seen(expected).items():
        assert torch.allclose(value, tensors[name], atol=1e-6), name
    figures = json.loads((two / "figures.json").read_text())
    assert figures == {
        name: pytest.approx(value, rel=1e-4) for name, value in json.loads((one / "figures.json").read_text()).items()
    }
    assert np.allclose(np.load(one / "scores.npy"), np.load(two / "scores.npy"), atol=1e-4)


def test_rows_are_dealt_out_by_work() -> None:
    assert deal(["a", "b", "c", "d", "e"], [5, 1, 4, 3, 1], [0.0, 0.0]) == [["a", "b", "e"], ["c", "d"]]
    units = units_of(rows_of([40, 3, 5, 20, 20, 2]))
    shares = parts_of(units, 50, None, 2)
    every = [unit for share in shares for part in share for unit in part.units]
    assert {id(unit[0]) for unit in every} == {id(unit[0]) for unit in units}
    assert len(every) == len(units)
    tokens = [sum(len(row) for part in share for unit in part.units for row in unit) for share in shares]
    assert max(tokens) <= 50
