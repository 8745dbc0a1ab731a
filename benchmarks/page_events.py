"""How soon `agentloop view FILE` shows a trace of very many events, and how much memory its tab takes.

Called by `pages.py --events N`. The file is an Inspect log with one sample, as large as one that Inspect's users could
not open (inspect_ai#4583: 337,000 events, 130,000 messages). Measured: seconds from the start of the command until
Chromium has drawn the page of the trace, CPU seconds of the service until then, seconds from there to the last step,
and the resident memory of the tab's process and of the service.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

MAX_OPEN_S, MAX_TAB_MB = 5.0, 300.0
PER_STEP = 5
"""Events of a step: a model's answer, a call of a tool, the change of the state, and the span around them."""
CPU_CLOCK = 2
"""Linux: the part of a clock's id that means the CPU time of a whole process."""
STARTED = "2026-11-21T09:{:02}:{:02}+00:00"


def write_log(path: Path, n_events: int) -> int:
    """An Inspect log with one sample. Returns the number of its steps."""
    n_steps = n_events // PER_STEP
    messages: list[dict[str, Any]] = [{"id": "m", "role": "user", "content": "Read all lines."}]
    events: list[dict[str, Any]] = []
    for n in range(n_steps):
        messages += _messages(n)
        events += _events(n, messages[-2])
    header = {"version": 2, "status": "success", "eval": {"eval_id": "e", "run_id": "r", "task": "lines"}}
    sample = {
        "id": "1", "epoch": 1, "input": "Read all lines.", "messages": messages, "events": events,
        "output": {"model": "tiny", "choices": []}, "scores": {"lines": {"value": "I", "answer": "no"}},
    }  # fmt: skip
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("header.json", json.dumps(header))
        archive.writestr("samples/1_epoch_1.json", json.dumps(sample))
    return n_steps


def _messages(n: int) -> Iterator[dict[str, Any]]:
    call = {"id": f"c{n}", "function": "shell", "arguments": {"command": f"sed -n {n}p all.txt"}, "type": "function"}
    yield {"id": f"a{n}", "role": "assistant", "content": f"I read line {n}.", "model": "tiny", "tool_calls": [call]}
    text = f"line {n}: " + " ".join(f"word-{n}-{k}" for k in range(12))
    yield {"id": f"t{n}", "role": "tool", "content": text, "tool_call_id": f"c{n}", "function": "shell"}


def _events(n: int, answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    at = STARTED.format(n // 60 % 60, n % 60)
    common = {"timestamp": at, "working_start": float(n), "span_id": f"s{n}"}
    usage = {"input_tokens": 900, "output_tokens": 40, "total_tokens": 940}
    choices = [{"message": answer, "stop_reason": "tool_calls"}]
    yield {"event": "span_begin", "id": f"s{n}", "name": "step", **common}
    output = {"model": "tiny", "choices": choices, "usage": usage}
    yield {"event": "model", "model": "tiny", "input": [f"attachment://{n:032x}"], "output": output, **common}
    yield {"event": "tool", "id": f"c{n}", "function": "shell", "arguments": {"n": n}, "result": "read", **common}
    yield {"event": "state", "changes": [{"op": "replace", "path": "/messages", "value": n}], **common}
    yield {"event": "span_end", "id": f"s{n}", **common}


def measured(n_events: int, rounds: int) -> list[dict[str, float]]:
    """What each of some openings of such a file took; see `_opened`."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    assert program, "no chromium here; install Debian's package `chromium`"
    arguments = ["--no-sandbox", "--disable-dev-shm-usage"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "log.eval"
        n_steps = write_log(path, n_events)
        costs = []
        for _ in range(rounds):
            browser = playwright.chromium.launch(executable_path=program, args=arguments)
            costs.append(_opened(browser, path, n_steps))
            browser.close()
        return costs


def _opened(browser: Browser, path: Path, n_steps: int) -> dict[str, float]:
    """Seconds until the page of the trace is drawn, and its last step; CPU seconds of the service until the former;
    megabytes of the tab and of the service."""
    began = time.monotonic()
    command = [sys.executable, "-m", "agentloop_cli", "view", str(path), "--no-browser"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        address = next(match[0] for line in process.stderr if (match := re.search(r"http\S+", line)))
        page = browser.new_page()
        page.goto(address)
        base = address.split("/enter")[0]
        while "/traces/" not in page.url:  # the list, until all is imported
            links = page.locator("a[href^='/traces/']")
            page.goto(f"{base}{links.first.get_attribute('href')}" if links.count() else f"{base}/traces")
        page.locator("#step-0").wait_for()
        open_s = time.monotonic() - began
        cpu_s = process_cpu_s(process.pid)
        last = n_steps - 1
        jumped = time.monotonic()
        page.goto(f"{page.url.split('?')[0]}?step={last}#step-{last}")
        page.locator(f"#step-{last}").wait_for()
        jump_s = time.monotonic() - jumped
        return {
            "open_s": open_s, "open_cpu_s": cpu_s, "last_step_s": jump_s,
            "tab_mb": _tab_mb(page), "service_mb": _rss_mb(process.pid),
        }  # fmt: skip
    finally:
        process.terminate()
        process.wait(60)


def process_cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process, those that have ended included, to the nanosecond."""
    clock = (~pid << 3) | CPU_CLOCK  # clock_getcpuclockid(3), which Python has for threads alone
    return time.clock_gettime(clock)


def _rss_mb(pid: int) -> float:
    [line] = [one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def _tab_mb(page: Page) -> float:
    """Resident memory of the largest process that draws pages: the tab's."""
    browser = page.context.browser
    assert browser is not None
    session = browser.new_browser_cdp_session()
    processes = session.send("SystemInfo.getProcessInfo")["processInfo"]
    return max(_rss_mb(process["id"]) for process in processes if process["type"] == "renderer")


def report(n_events: int, rounds: int) -> int:
    """Print the medians; 1 if a limit is missed."""
    costs = measured(n_events, rounds)
    medians = {name: statistics.median(one[name] for one in costs) for name in costs[0]}
    for name, value in medians.items():
        print(f"{name:12} {value:8.2f} (from {min(o[name] for o in costs):.2f} to {max(o[name] for o in costs):.2f})")
    load = [round(one, 2) for one in os.getloadavg()]
    print(json.dumps({"events": n_events, **medians, "load": load}))
    return int(medians["open_s"] > MAX_OPEN_S or medians["tab_mb"] > MAX_TAB_MB)
