"""A server whose life is a script: what it does at each start, by number. Run as `scripted.py PORT FOLDER ACT…`.

A start takes the next act, or the last one again: `serve`; `die` at once; `late` serves after a second; `hang` serves
and soon answers nobody; `crash` serves and soon dies; `deaf` serves and ignores SIGTERM. Each has a child, as vLLM
has its engine, and one in a session of its own; what was started is written to FOLDER/pids, and every request for an
adapter to FOLDER/asked.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SOON_S = 0.6


def main(port: int, folder: Path, acts: list[str]) -> None:
    pids = folder / "pids"
    n = len(pids.read_text().splitlines()) if pids.exists() else 0
    act = acts[min(n, len(acts) - 1)]
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(sleeper)
    apart = subprocess.Popen(sleeper, start_new_session=True)
    with pids.open("a") as file:
        file.write(f"{os.getpid()} {child.pid} {apart.pid}\n")
    print(f"start {n}: {act}", flush=True)
    if act == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if act == "die":
        sys.exit("no such model")
    if act == "late":
        time.sleep(1)
    if act == "crash":
        threading.Timer(SOON_S, lambda: os._exit(9)).start()
    began = time.monotonic()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if act == "hang" and time.monotonic() - began > SOON_S:
                time.sleep(600)
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            with (folder / "asked").open("a") as file:
                file.write(f"{self.path} {body}\n")
            self.send_response(400 if "missing" in body else 200)
            self.end_headers()
            self.wfile.write(b"no such adapter" if "missing" in body else b"ok")

        def log_message(self, format: str, *args: object) -> None:
            """Be quiet."""

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
