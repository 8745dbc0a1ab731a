"""maida-ai's one-sided Wilson rule with its default confidence, run by `gate_others.py` in an environment that has it.

Reads a JSON line of worlds, each [passes, trials, lowest pass rate], and writes a JSON line of verdicts.
"""

from __future__ import annotations

import json
import sys

from maida.statistics import aggregate_outcomes

for line in sys.stdin:
    verdicts = [
        aggregate_outcomes(
            "suite", [True] * passes + [False] * (trials - passes), pass_rate_threshold=threshold
        ).verdict
        for passes, trials, threshold in json.loads(line)
    ]
    print(json.dumps([verdict.value.upper() for verdict in verdicts if verdict is not None]), flush=True)
