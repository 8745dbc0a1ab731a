"""The demo's promises, on fresh seeds: does it learn, how long does it take, does it repeat?

    python benchmarks/demo.py --seeds 101 102 103 104 105 --repeat 101

Runs `agentloop demo` as a person would, one seed after the other, and holds each run against the
stated bounds. The other thing in the same run is the same loop untrained: version 1, the warm
start, on the same held-out tasks. Exits 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MAX_BEFORE, MIN_AFTER = 0.45, 0.90
MAX_WALL_S, MAX_CPU_S = 300.0, 240.0


def run(seed: int, out: Path, sandbox: str) -> dict:
    """One demo: its document, with wall and CPU seconds of the whole process tree as seen from outside."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "agentloop_cli", "demo", "--seed", str(seed), "--out", str(out)]
    done = subprocess.run([*command, "--sandbox", sandbox, "--json"], stdout=subprocess.PIPE, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    document = json.loads(done.stdout)
    document["outside"] = {
        "wall_s": time.perf_counter() - started,
        "cpu_s": (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime),
        "load": os.getloadavg()[0],
    }
    return document


def misses(document: dict) -> list[str]:
    """Bounds that a run missed."""
    heldout = document["heldout"]
    found = {
        f"before {heldout['before']['success']:.2f} > {MAX_BEFORE}": heldout["before"]["success"] > MAX_BEFORE,
        f"after {heldout['after']['success']:.2f} < {MIN_AFTER}": heldout["after"]["success"] < MIN_AFTER,
        f"decision {document['decision']}": document["decision"] != "promote",
        f"wall {document['outside']['wall_s']:.0f} s > {MAX_WALL_S:.0f}": document["outside"]["wall_s"] > MAX_WALL_S,
        f"model CPU {document['cpu_s']:.0f} s > {MAX_CPU_S:.0f}": document["cpu_s"] > MAX_CPU_S,
    }
    return [what for what, missed in found.items() if missed]


def fingerprint(document: dict) -> list[tuple[str, str | None]]:
    """What must repeat: version hashes and verdicts."""
    return [(version["sha256"], version["decision"]) for version in document["versions"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103, 104, 105])
    parser.add_argument("--repeat", type=int, nargs="*", default=[], help="seeds to run a second time and compare")
    parser.add_argument("--sandbox", default="auto")
    options = parser.parse_args()
    results, failed = {}, []
    heads = ("seed", "before", "after", "turns", "decision", "wall s", "cpu s", "all cpu", "load")
    print(" ".join(f"{head:>8}" for head in heads))
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            document = results[seed] = run(seed, Path(folder) / str(seed), options.sandbox)
            heldout, outside = document["heldout"], document["outside"]
            figures = (
                seed,
                f"{heldout['before']['success']:.3f}",
                f"{heldout['after']['success']:.3f}",
                len(document["versions"]) - 1,
                document["decision"],
                f"{outside['wall_s']:.0f}",
                f"{document['cpu_s']:.0f}",
                f"{outside['cpu_s']:.0f}",
                f"{outside['load']:.1f}",
            )
            print(" ".join(f"{figure:>8}" for figure in figures), flush=True)
            failed += [f"seed {seed}: {miss}" for miss in misses(document)]
        for seed in options.repeat:
            again = run(seed, Path(folder) / f"{seed}-again", options.sandbox)
            same = fingerprint(again) == fingerprint(results[seed])
            print(f"{seed:>8} again: {'same versions and verdicts' if same else 'DIFFERENT'}")
            failed += [] if same else [f"seed {seed}: a second run differs"]
    for miss in failed:
        print(f"missed: {miss}")
    print(json.dumps({"seeds": options.seeds, "missed": failed, "runs": [summary(d) for d in results.values()]}))
    return 1 if failed else 0


def summary(document: dict) -> dict:
    """The part of a document that a figure is quoted from."""
    keys = ("seed", "sandbox", "heldout", "decision", "episodes", "tool_calls", "wall_s", "cpu_s", "outside")
    return {key: document[key] for key in keys}


if __name__ == "__main__":
    sys.exit(main())
