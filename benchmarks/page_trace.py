"""The page of a trace in a real browser: first paint, bytes, elements, deep links, huge texts, and search.

    python benchmarks/page_trace.py [--spans 10000] [--rounds 5] [--keep FOLDER]

Stores a trace of as many spans, an attempt of ours of as many steps with a call and a result each, an imported trace of
the same, two to compare them with, and traces with a message of 50 MB, JSON of 100 levels and a line of 5 MB. Each
round starts `agentloop view` anew and opens every page once, each in a new profile of Chromium, so that the browser has
nothing cached. The last line is JSON; `benchmarks/results/page_trace.json` has that of the last full run. Exits 1 if a
median misses its limit: first paint 1 s, 300 KB and 1,500 elements a page, 0.3 s a search.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.request import HTTPCookieProcessor, build_opener

import orjson
from playwright.sync_api import Browser, sync_playwright

from agentloop.store.store import Store
from agentloop.types import (
    Attempt,
    Completion,
    Episode,
    EpisodeState,
    Failure,
    FailureType,
    Imported,
    Message,
    Purpose,
    RewardState,
    Span,
    Split,
    Step,
    Task,
    ToolCall,
    ToolResult,
    Trace,
    Verdict,
)

NOW = datetime(2026, 11, 21, 9, 30, tzinfo=UTC)
OWN, IMPORTED, SPANS = (f"{n:032x}" for n in (1, 2, 3))
MESSAGE, LEVELS, LINE = (f"{n:032x}" for n in (4, 5, 6))
OTHER, OTHER_SPANS = (f"{n:032x}" for n in (7, 8))
"""To compare with: as IMPORTED and SPANS, but a step in the middle differs."""
FIRST_PAINT = """() => new Promise((done) => new PerformanceObserver((list) => done(list.getEntries()[0].startTime))
    .observe({type: "paint", buffered: true}))"""
"""Milliseconds until the browser drew anything."""
MAX_PAINT_S, MAX_SEARCH_S = 1.0, 0.3
MAX_BYTES, MAX_ELEMENTS = 300_000, 1_500


def long_trace(trace_id: str, n_steps: int, other: int | None = None) -> Trace:
    """Steps with a call and a result of about 1 KB, none like another, a few seconds apart.

    other: a step whose call differs.
    """
    steps = []
    for n in range(n_steps):
        call = ToolCall(
            id=f"c{n}",
            name="shell" if n % 7 else "search",
            arguments=json.dumps({"command": f"sed -n {n}p {'b' if n == other else 'a'}"}),
        )
        message = Message(
            role="assistant", content=f"I read line {n}.", reasoning=f"Line {n} next.", tool_calls=(call,)
        )
        text = f"line {n}: " + " ".join(f"word-{n}-{k}" for k in range(70))
        result = ToolResult(call_id=f"c{n}", name=call.name, content=text, ok=n % 50 != 49, exit_code=int(n % 50 == 49))
        completion = Completion(message=message, finish_reason="stop", n_prompt_tokens=900, n_completion_tokens=40)
        started = NOW + timedelta(seconds=3 * n)
        steps.append(Step(index=n, completion=completion, results=(result,), started_at=started, duration_s=2.0))
    return Trace(
        id=trace_id,
        source="benchmark",
        messages=(Message(role="user", content="Read all lines."),),
        steps=tuple(steps),
        started_at=NOW,
        duration_s=3.0 * n_steps,
    )


def attempt_of(trace: Trace) -> Attempt:
    """The trace as an attempt of ours, which failed at its last but one step."""
    task = Task(id="lines", instruction="Read all lines.", split=Split.train, pool="lines")
    episode = Episode(
        id="e-lines", task_id="lines", group="g/0", purpose=Purpose.train, policy_version=1, seed=1,
        state=EpisodeState.finished,
    )  # fmt: skip
    ours = trace.model_copy(update={"episode_id": episode.id, "task_id": task.id, "source": "agentloop"})
    step = trace.steps[-2]
    verdict = misread(trace.id, step.index, step.results[0].content[5:60])
    return Attempt(task=task, episode=episode, trace=ours, verdict=verdict)


def misread(trace_id: str, step: int, evidence: str) -> Verdict:
    """A verdict with one failure, which quotes words of a step."""
    failure = Failure(type=FailureType.obs_misread, step=step, evidence=evidence, detector="x@1", critical=True)
    return Verdict(trace_id=trace_id, state=RewardState.scored, reward=0.0, failures=(failure,), taxonomy="2")


def spans_of(trace_id: str, n_spans: int, other: int | None = None) -> list[Span]:
    """An agent whose calls of a model and of a tool alternate; each call repeats the last messages before it.

    other: a span whose call differs.
    """
    start = int(NOW.timestamp()) * 10**9
    root = f"{1:016x}"
    empty = {"resource": {"attributes": {}}, "scope": {"attributes": {}}}
    spans = [
        Span(trace_id, root, None, "invoke_agent reader", "agent", start, start + n_spans * 10**9, None, "s1", "reader",
             None, None, 0, 0, None, orjson.dumps({"attributes": {}, **empty}), ())
    ]  # fmt: skip
    earlier: list[bytes] = [orjson.dumps({"role": "user", "content": "Read all lines."})]
    for n in range(1, n_spans):
        at = start + n * 10**9
        if n % 2:
            call = {
                "id": f"c{n}",
                "type": "function",
                "function": {"name": "shell", "arguments": f'{{"n": {-n if n == other else n}}}'},
            }
            answer = orjson.dumps({"role": "assistant", "content": f"I read line {n}.", "tool_calls": [call]})
            attributes = {
                "gen_ai.operation.name": "chat",
                "gen_ai.input.messages": [{"$": k} for k in range(len(earlier))],
                "gen_ai.output.messages": [{"$": len(earlier)}],
            }
            bodies = (*earlier, answer)
            earlier = [*earlier, answer][-20:]
            kind, name, tool = "chat", "chat tiny", None
        else:
            text = f"line {n}: " + " ".join(f"word-{n}-{k}" for k in range(70))
            result = orjson.dumps(text)
            attributes = {"gen_ai.tool.call.id": f"c{n - 1}", "gen_ai.tool.call.result": {"$": 0}}
            bodies = (result,)
            message = {"role": "tool", "tool_call_id": f"c{n - 1}", "content": text}
            earlier = [*earlier, orjson.dumps(message)][-20:]
            kind, name, tool = "tool", "execute_tool shell", "shell"
        error = "exit code 1" if n % 100 == 0 else None
        head = orjson.dumps({"attributes": attributes, **empty})
        spans.append(
            Span(trace_id, f"{n + 1:016x}", root, name, kind, at, at + 8 * 10**8, error, "s1", None,
                 None if tool else "tiny", tool, 0 if tool else 900, 0 if tool else 40, None, head, bodies)
        )  # fmt: skip
    return spans


def with_result(trace_id: str, text: str, arguments: str = "{}") -> Imported:
    """A trace with one huge text."""
    message = Message(role="assistant", tool_calls=(ToolCall(id="c", name="shell", arguments=arguments),))
    result = ToolResult(call_id="c", name="shell", content=text, ok=True)
    step = Step(index=0, completion=Completion(message=message, finish_reason="stop"), results=(result,))
    return Imported(trace=Trace(id=trace_id, messages=(Message(role="user", content="Go."),), steps=(step,)))


def filled(path: Path, n_spans: int) -> None:
    """A store with all of them."""
    store = Store(path)
    trace = long_trace(OWN, n_spans)
    store.put_attempts("run", [attempt_of(trace)])
    middle = n_spans // 2
    imported = long_trace(IMPORTED, n_spans)
    step = imported.steps[-2]
    verdict = misread(IMPORTED, step.index, step.results[0].content[5:60])
    store.put_imported("default", [Imported(trace=imported, verdict=verdict)])
    store.put_imported("default", [Imported(trace=long_trace(OTHER, n_spans, middle))])
    for spans in (spans_of(SPANS, n_spans), spans_of(OTHER_SPANS, n_spans, middle | 1)):
        for n in range(0, n_spans, 1000):
            store.put_spans("default", spans[n : n + 1000])
    quoted = n_spans - 2 - n_spans % 2
    verdict = misread(SPANS, quoted // 2 - 1, f"line {quoted}: word-{quoted}-0")
    store.put_person_label("default", SPANS, verdict.failures[0], by="benchmark", why="it repeats another line")
    nested = json.dumps({"a": 1})
    for _ in range(100):
        nested = f'{{"level": {nested}}}'
    lines = "\n".join(f"line {n} " + "x" * 90 for n in range(500_000))
    store.put_imported("default", [with_result(MESSAGE, lines)])
    store.put_imported("default", [with_result(LEVELS, "ok", nested)])
    store.put_imported("default", [with_result(LINE, "y" * 5_000_000)])
    store.close()


@contextmanager
def viewed(path: Path) -> Iterator[str]:
    """The address that `agentloop view` prints for a store."""
    command = [sys.executable, "-m", "agentloop_cli", "view", "--store", str(path), "--no-browser"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        match = re.search(r"http\S+", line)
        assert match, line
        yield match[0]
    finally:
        process.terminate()
        process.wait()


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium without a window."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    assert program, "no chromium here; install Debian's package `chromium`"
    arguments = ["--no-sandbox", "--disable-dev-shm-usage"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


def opened(browser: Browser, address: str, paths: dict[str, str]) -> dict[str, dict[str, float]]:
    """What each page cost in a browser that has nothing cached: seconds to the first paint, bytes of HTML, elements."""
    base = address.split("/enter")[0]
    first = browser.new_context()
    first.new_page().goto(address)
    cookies = first.cookies()
    first.close()
    costs = {}
    for name, path in paths.items():
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.add_cookies(cookies)  # type: ignore[arg-type]
        page = context.new_page()
        response = page.goto(base + path)
        assert response is not None
        assert response.status == 200, (name, response.status)
        paint = page.evaluate(FIRST_PAINT)
        target = path.partition("#")[2]
        assert not target or page.locator(f"[id='{target}']").count() == 1, f"{name}: nothing called {target}"
        costs[name] = {
            "paint_s": paint / 1000,
            "bytes": len(response.body()),
            "elements": page.evaluate("document.querySelectorAll('*').length"),
        }
        context.close()
    return costs


def searched(address: str, line: int) -> dict[str, float]:
    """Seconds of a search as JSON, by kind of trace and query, by a reader who has the page of the trace open.

    line: an even number of a line that each trace has.
    """
    opener = build_opener(HTTPCookieProcessor())
    opener.open(address).read()
    base = address.split("/enter")[0]
    spent = {}
    for name, trace_id in (("own", OWN), ("imported", IMPORTED), ("spans", SPANS)):
        opener.open(f"{base}/traces/{trace_id}").read()
        for what, query in (("text", f"q=word-{line}-7"), ("tool", "tool=shell"), ("none", "q=nothing+like+this")):
            started = time.perf_counter()
            hits = json.loads(opener.open(f"{base}/api/v1/traces/{trace_id}/search?{query}").read())
            spent[f"{name} {what}"] = time.perf_counter() - started
            assert (hits["n"] == 0) == (what == "none"), (name, what, hits["n"])
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spans", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="Keep the store in this folder, and use it if it is there.")
    options = parser.parse_args()
    middle = options.spans // 2
    paths = {
        "own": f"/traces/{OWN}",
        "own step": f"/traces/{OWN}?step={middle}#step-{middle}",
        "own failure": f"/traces/{OWN}?failure=1#evidence",
        "own outline": f"/traces/{OWN}?tab=tree",
        "imported": f"/traces/{IMPORTED}",
        "imported step": f"/traces/{IMPORTED}?step={middle}#step-{middle}",
        "imported failure": f"/traces/{IMPORTED}?failure=1#evidence",
        "imported call": f"/traces/{IMPORTED}?at={middle}&tab=call",
        "spans": f"/traces/{SPANS}",
        "spans step": f"/traces/{SPANS}?step={middle // 2}#step-{middle // 2}",
        "spans failure": f"/traces/{SPANS}?failure=1#evidence",
        "spans call": f"/traces/{SPANS}?at={middle:016x}&tab=call",
        "compare": f"/compare?a={IMPORTED}&b={OTHER}",
        "compare spans": f"/compare?a={SPANS}&b={OTHER_SPANS}",
        "50 MB message": f"/traces/{MESSAGE}",
        "100 levels": f"/traces/{LEVELS}",
        "5 MB line": f"/traces/{LINE}",
    }
    pages: list[dict[str, dict[str, float]]] = []
    searches: list[dict[str, float]] = []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        store = (options.keep or Path(folder)) / "store.db"
        if not store.exists():
            filled(store, options.spans)
        for _ in range(options.rounds):
            with viewed(store) as address:
                pages.append(opened(browser, address, paths))
            with viewed(store) as address:
                searches.append(searched(address, middle - middle % 2))
    report(pages, searches, options.spans, load)


def report(
    pages: list[dict[str, dict[str, float]]], searches: list[dict[str, float]], n_spans: int, load: float
) -> None:
    """Print the medians with the longest, and exit 1 if one misses its limit."""
    limits = {"paint_s": MAX_PAINT_S, "bytes": MAX_BYTES, "elements": MAX_ELEMENTS}
    medians: dict[str, Any] = {}
    misses = []
    for name in pages[0]:
        costs = {key: statistics.median(one[name][key] for one in pages) for key in limits}
        slowest = max(one[name]["paint_s"] for one in pages)
        medians[name] = {**costs, "slowest_paint_s": slowest}
        misses += [f"{name}: {key} {value:g}" for key, value in costs.items() if value > limits[key]]
        size = f"{costs['bytes'] / 1000:7.0f} KB {costs['elements']:6.0f} elements"
        print(f"{name:16} {costs['paint_s']:6.2f} s (at most {slowest:.2f}) {size}")
    spent = {name: statistics.median(one[name] for one in searches) for name in searches[0]}
    for name, seconds in spent.items():
        print(f"search {name:16} {seconds:6.3f} s")
    misses += [f"search {name}: {seconds:.3f} s" for name, seconds in spent.items() if seconds > MAX_SEARCH_S]
    print("misses:", "; ".join(misses) or "none")
    figures = {
        "spans": n_spans,
        "rounds": len(pages),
        "pages": medians,
        "search_s": spent,
        "misses": misses,
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(figures))
    raise SystemExit(bool(misses))


if __name__ == "__main__":
    main()
