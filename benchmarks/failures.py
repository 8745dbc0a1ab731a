"""Why episodes fail: how often we are right about it, with intervals, and what finding out costs.

    python benchmarks/failures.py --data DIR [--part rules] [--part goals] [--part learned]

DIR holds labelled and scored traces, a folder for each source; `pip install ./benchmarks/research_formats` adds the
formats of those that no agent framework writes. The goals are what users get (`failures_goals.py`).
Rules are measured on episodes with injected faults and on other people's runs that succeeded; the learned scorer by
cross-validation that keeps a task's traces on one side. The last line is JSON. Exits 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

PARTS = ("rules", "goals", "learned")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of traces; see above")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be given twice")
    options = parser.parse_args()
    if not options.data.is_dir():
        parser.error(f"--data: {options.data} is no folder; name one with traces in it")
    figures = {
        part: importlib.import_module(f"failures_{part}").measure(options.data) for part in options.part or PARTS
    }
    missed = [f"{part}: {miss}" for part, found in figures.items() for miss in found.get("missed", [])]
    for miss in missed:
        print(f"missed: {miss}")
    print(json.dumps({**figures, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
