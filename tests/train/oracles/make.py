"""Losses, gradients, weights and advantages as TRL 1.16.0 and verl 0.9.1 compute them, frozen for our tests.

Needs both packages, and nothing of agentloop: `python tests/train/oracles/make.py FOLDER` writes `trl.npz` and
`verl.npz`. Each case `NAME` has `NAME/loss` and `NAME/grad`, the gradient by the log-probabilities of `inputs`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from frozen import inputs
from trl_losses import trl_cases
from verl_losses import verl_cases


def main(folder: Path) -> None:
    """Write both files, each with the inputs."""
    frozen_inputs = {f"inputs/{name}": value.numpy() for name, value in inputs().items()}
    for name, cases in (("trl", trl_cases), ("verl", verl_cases)):
        np.savez_compressed(folder / f"{name}.npz", **frozen_inputs, **cases())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
