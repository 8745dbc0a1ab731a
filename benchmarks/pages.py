"""What the pages cost the service, and how soon a person sees what was stored.

    python benchmarks/pages.py [--rounds 20] [--pages 2000] [--seconds 20]
    python benchmarks/pages.py --events 337000 [--rounds 5]     # only page_events.py

Starts `agentloop serve` over a store with 300 traces. Measured: CPU of each kind of page, over --rounds requests;
memory over --pages pages; CPU of 50 pages that update themselves; the time from the acknowledgement of spans until an
open list in Chromium announces them; the rate of spans at half of its maximum, with and without ten pages a second
beside it; the size of what the pages add to the wheel, and the bytes that a browser loads once for all pages. Not here:
lists over a million spans (page_lists.py), the page of a long trace (page_trace.py), the gateway (gateway.py). CPU is
that of the service alone, from /proc. The last line is JSON; exits 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import orjson
import page_events
from playwright.sync_api import sync_playwright

from agentloop.store.store import Store
from agentloop.types import Span

PAGES = (
    "/", "/traces", "/traces/{trace}", "/failures", "/runs", "/runs/loop", "/tasks", "/versions", "/gates", "/review",
    "/review/{trace}", "/costs", "/work", "/docs",
)  # fmt: skip
BOUNDS = {
    "page_cpu_ms": 10.0,
    "live_p95_s": 3.0,
    "live_50_cores": 0.1,
    "memory_added_mb": 50.0,
    "wheel_added_kb": 250.0,
    "loaded_kb": 60.0,
}
"""Maxima; `ingest_kept` has a minimum of 0.95."""
N_LIVE, N_TRACES, PER_TRACE = 50, 300, 10
START_NS = 1_767_225_600 * 10**9
ROOT = Path(__file__).parents[1]


class Service(NamedTuple):
    """A running service with a browser's session."""

    pid: int
    url: str
    client: httpx.Client

    def cpu_s(self) -> float:
        """CPU seconds of all its threads, to the nanosecond."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def rss_mb(self) -> float:
        """Resident memory."""
        [line] = [one for one in Path(f"/proc/{self.pid}/status").read_text().splitlines() if one.startswith("VmRSS")]
        return int(line.split()[1]) / 1024


def fill(store: Store) -> str:
    """Stores the traces. Returns the id of one."""
    for number in range(N_TRACES):
        spans = []
        for n in range(PER_TRACE):
            kind = "agent" if n == 0 else ("chat", "tool")[n % 2]
            body = orjson.dumps(f"words {number} {n} of a message that says little")
            spans.append(
                Span(
                    trace_id=f"{number + 1:032x}",
                    span_id=f"{n + 1:016x}",
                    parent_id=None if n == 0 else f"{1:016x}",
                    name=f"{kind} {n}",
                    kind=kind,
                    start_ns=START_NS + (number * 100 + n) * 10**9,
                    end_ns=START_NS + (number * 100 + n + 1) * 10**9,
                    error=None,
                    session="s",
                    agent="helper",
                    model="tiny" if kind == "chat" else None,
                    tool="shell" if kind == "tool" else None,
                    n_prompt_tokens=100,
                    n_completion_tokens=10,
                    cost_usd=0.01,
                    head=orjson.dumps({"attributes": {}, "resource": {}, "scope": {}, "events": [], "links": []}),
                    bodies=(body,) if n else (),
                )
            )
        store.put_spans(store.project, spans)
    return f"{N_TRACES:032x}"


@contextmanager
def serving(folder: Path) -> Iterator[Service]:
    """`agentloop serve` over a filled store."""
    command = [sys.executable, "-m", "agentloop_cli", "serve", "--store", str(folder / "store.db"), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if match := re.search(r"pages: (http://\S+?)(/enter\S+)", line):
                break
        client = httpx.Client(base_url=match[1], follow_redirects=True, timeout=60)  # type: ignore[index]
        threading.Thread(target=process.stderr.read, daemon=True).start()
        client.get(match[2]).raise_for_status()  # type: ignore[index]
        yield Service(process.pid, match[1], client)  # type: ignore[index]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def page_costs(service: Service, trace: str, rounds: int) -> dict[str, float]:
    """Page -> median CPU in milliseconds; each once before, to fill caches."""
    costs = {}
    for template in PAGES:
        path = template.format(trace=trace)
        service.client.get(path).raise_for_status()
        times = []
        for _ in range(rounds):
            before = service.cpu_s()
            service.client.get(path).raise_for_status()
            times.append(1000 * (service.cpu_s() - before))
        costs[template] = statistics.median(times)
    return costs


def memory_added(service: Service, trace: str, n: int) -> float:
    """Megabytes that `n` pages add, of all kinds in turn."""
    paths = [template.format(trace=trace) for template in PAGES if template != "/docs"]
    for path in itertools.islice(itertools.cycle(paths), 50):
        service.client.get(path)
    before = service.rss_mb()
    for path in itertools.islice(itertools.cycle(paths), n):
        service.client.get(path)
    return service.rss_mb() - before


def live_cores(service: Service, seconds: float) -> float:
    """Cores that 50 pages take which update themselves every two seconds."""
    addresses = []
    for path in ("/traces", "/runs/loop", "/work"):
        page = service.client.get(path).text
        for match in re.finditer(r'hx-get="([^"]+)"[^>]*every 2s|every 2s[^>]*hx-get="([^"]+)"', page):
            addresses.append((match[1] or match[2]).replace("&amp;", "&"))
    assert addresses, "no page updates itself"
    ends_at = time.monotonic() + seconds
    cookies = dict(service.client.cookies)

    def poll(address: str) -> None:
        with httpx.Client(base_url=service.url, cookies=cookies, timeout=30) as client:
            while time.monotonic() < ends_at:
                client.get(address, headers={"hx-request": "true"})
                time.sleep(2)

    before = service.cpu_s()
    threads = [
        threading.Thread(target=poll, args=(address,))
        for address in itertools.islice(itertools.cycle(addresses), N_LIVE)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (service.cpu_s() - before) / seconds


def export(trace: int, n: int) -> dict[str, Any]:
    """An OTLP request with spans of a new trace."""
    spans = [
        {
            "traceId": f"{trace:032x}",
            "spanId": f"{k + 1:016x}",
            "name": "live",
            "startTimeUnixNano": str(START_NS),
            "endTimeUnixNano": str(START_NS + 10**9),
        }
        for k in range(n)
    ]
    return {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}


def live_delays(service: Service, rounds: int) -> list[float]:
    """Seconds from the acknowledgement of a new trace until an open list announces it."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    options = ["--no-sandbox", "--disable-dev-shm-usage"] if os.geteuid() == 0 else []
    delays = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=options)
        context = browser.new_context()
        cookies = [{"name": name, "value": value, "url": service.url} for name, value in service.client.cookies.items()]
        context.add_cookies(cookies)  # type: ignore[arg-type]
        page = context.new_page()
        page.goto(f"{service.url}/traces")
        for n in range(rounds):
            expected = re.compile(rf"\b{n + 1} new\b")
            time.sleep(0.37 * (n % 5))  # not in step with the page
            httpx.post(f"{service.url}/v1/traces", json=export(2**64 + n, 1)).raise_for_status()
            sent_at = time.monotonic()
            while not expected.search(page.inner_text("main")):
                assert time.monotonic() - sent_at < 20, "the list never announced it"
                page.wait_for_timeout(20)
            delays.append(time.monotonic() - sent_at)
        browser.close()
    return delays


class Ingest:
    """Sends spans over four connections."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._numbers = itertools.count(2**80)

    def rate(self, seconds: float, wanted: float | None = None) -> float:
        """Spans a second that were acknowledged. wanted: at most so many are sent."""
        ends_at = time.monotonic() + seconds
        sent = [0] * 4

        def send(place: int) -> None:
            with httpx.Client(base_url=self._service.url, timeout=60) as client:
                while time.monotonic() < ends_at:
                    began = time.monotonic()
                    client.post("/v1/traces", json=export(next(self._numbers), 100)).raise_for_status()
                    sent[place] += 100
                    if wanted is not None:
                        time.sleep(max(0.0, 400 / wanted - (time.monotonic() - began)))

        threads = [threading.Thread(target=send, args=(place,)) for place in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(sent) / seconds


def ingest_kept(service: Service, trace: str, seconds: float) -> float:
    """The rate at half of the maximum, beside ten pages a second, as a share of the same without pages."""
    ingest = Ingest(service)
    half = ingest.rate(seconds) / 2
    alone = ingest.rate(seconds, half)
    is_over = threading.Event()
    paths = [template.format(trace=trace) for template in PAGES[:-1]]

    def look() -> None:
        for path in itertools.cycle(paths):
            if is_over.wait(0.1):
                return
            service.client.get(path)

    thread = threading.Thread(target=look)
    thread.start()
    beside = ingest.rate(seconds, half)
    is_over.set()
    thread.join()
    return beside / alone


def sizes_kb(service: Service) -> dict[str, float]:
    """What the pages add to the wheel, compressed, and what a browser loads besides a page itself."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        folders = [ROOT / "agentloop" / "api" / "pages", ROOT / "agentloop" / "views"]
        for path in (path for folder in folders for path in folder.rglob("*") if path.suffix not in (".pyc", "")):
            archive.write(path, path.relative_to(ROOT))
    addresses = re.findall(r'(?:href|src)="(/assets/[^"]+)"', service.client.get("/").text)
    loaded = 0
    for address in addresses:
        with service.client.stream("GET", address, headers={"accept-encoding": "gzip"}) as answer:
            loaded += sum(map(len, answer.iter_raw()))
    return {"wheel_added_kb": len(buffer.getvalue()) / 1024, "loaded_kb": loaded / 1024}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pages", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--events", type=int, help="Measure only how soon a file of so many events is shown.")
    options = parser.parse_args()
    if options.events:
        return page_events.report(options.events, options.rounds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = Store(folder / "store.db")
        trace = fill(store)
        store.close()
        with serving(folder) as service:
            costs = page_costs(service, trace, options.rounds)
            delays = live_delays(service, options.rounds)
            figures = {
                "page_cpu_ms": statistics.median(costs.values()),
                "live_p95_s": statistics.quantiles(delays, n=20)[-1],
                "live_50_cores": live_cores(service, options.seconds),
                "memory_added_mb": memory_added(service, trace, options.pages),
                **sizes_kb(service),
            }
            kept = ingest_kept(service, trace, options.seconds)
    for path, ms in costs.items():
        print(f"{path:24} {ms:7.1f} ms CPU", flush=True)
    for figure, value in figures.items():
        print(f"{figure:24} {value:7.2f}, at most {BOUNDS[figure]:g}", flush=True)
    print(f"{'ingest_kept':24} {kept:7.2f}, at least 0.95", flush=True)
    load = [round(one, 2) for one in os.getloadavg()]
    print(json.dumps({**figures, "ingest_kept": kept, "cpu_ms": costs, "load": load}))
    is_good = kept >= 0.95 and all(value <= BOUNDS[figure] for figure, value in figures.items())
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
