"""Whether every quoted failure of imported traces is marked in the first window of its link.

    python benchmarks/page_evidence.py FOLDER

Imports every file of the folder, classifies why its traces failed, and opens each failure of each trace that was not
worth full reward as its link does, without a browser. Reports how many failed traces and quotes there are; exits 1 if a
quote has no mark. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from agentloop.formats.importing import load_formats, take, walk
from agentloop.judge.rejudge import JudgingOptions, rejudge
from agentloop.store.store import Store
from agentloop.views.marks import FOCUS
from agentloop.views.trace_page import TracePlace, TraceView, trace_view


def is_marked(view: TraceView) -> bool:
    """Whether the words of the failure that was asked for are marked in an item or in what a verifier said."""
    texts = [text for item in view.items for text in item.texts]
    texts += [score.text for score in view.scores if score.text is not None]
    return any(part.mark == FOCUS for text in texts for part in text.parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    figures = {"traces": 0, "failed": 0, "failed_with_quotes": 0, "quotes": 0, "marked": 0}
    with tempfile.TemporaryDirectory() as name:
        store = Store(Path(name) / "store.db")
        take(walk([folder]), load_formats(), lambda items: store.put_imported(store.project, items))
        asyncio.run(rejudge(store, {}, "", JudgingOptions(project=store.project), lambda n: None))
        for row in store.every():
            figures["traces"] += 1
            failures = trace_view(store, store.project, row.id, TracePlace()).failures
            quoted = [failure.number for failure in failures if failure.evidence.strip()]
            is_failed = bool(failures) or (row.reward is not None and row.reward < 1.0)
            figures["failed"] += is_failed
            figures["failed_with_quotes"] += bool(quoted)
            for number in quoted:
                figures["quotes"] += 1
                if is_marked(trace_view(store, store.project, row.id, TracePlace(failure=number))):
                    figures["marked"] += 1
                else:
                    print(f"no mark: {row.source} {row.id} failure {number}: {failures[number - 1].evidence[:100]!r}")
        store.close()
    for figure, value in figures.items():
        print(f"{figure:20} {value:6,}")
    print(json.dumps(figures))
    return int(not figures["quotes"] or figures["marked"] < figures["quotes"])


if __name__ == "__main__":
    sys.exit(main())
