"""agentassay's DeploymentGate with its defaults, run by `gate_others.py` in an environment that has the package.

Reads a JSON line of worlds, each {scenario: [baseline passes, its trials, candidate passes, its trials]}, and writes a
JSON line of verdicts. The package is under the AGPL: it is installed for this benchmark and nowhere else.
"""

from __future__ import annotations

import json
import sys

from agentassay.verdicts.gate import DeploymentGate
from agentassay.verdicts.verdict import VerdictFunction

VERDICTS = {"deploy": "PASS", "block": "FAIL", "warn": "INCONCLUSIVE", "skip": "INCONCLUSIVE"}


def results(passes: int, trials: int) -> list[bool]:
    return [True] * passes + [False] * (trials - passes)


compare, gate = VerdictFunction().evaluate_regression, DeploymentGate()
for line in sys.stdin:
    decisions = [
        gate.evaluate_suite(
            {name: compare(results(*counts[:2]), results(*counts[2:])) for name, counts in world.items()}
        )
        for world in json.loads(line)
    ]
    print(json.dumps([VERDICTS[str(overall.value)] for overall, _ in decisions]), flush=True)
