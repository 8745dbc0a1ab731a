"""A server whose life is a script: what it does at each start, by number. Run as `scripted.py PORT FOLDER ACT…`.

A start takes the next act, or the last one again: `serve`; `die` at once; `late` serves after a second; `hang` soon
answers nobody, and `crash` soon dies, both counted from the first question, however long the start took; `doomed` dies
after it has listed its models without one that was unloaded; `deaf` serves and ignores SIGTERM. Each has a child, as
vLLM has its engine, and one in a session of its own; what was started is written to FOLDER/pids, and every request for
an adapter to FOLDER/asked. `/v1/models` lists the adapters as vLLM does; one whose folder is not there is refused.
"""

from __future__ import annotations

import json
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
    asked_at: list[float] = []
    adapters: dict[str, str] = {}
    unloaded: list[str] = []

    def end_soon() -> None:
        threading.Timer(SOON_S, lambda: os._exit(9)).start()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked_at.append(time.monotonic())
            if act == "hang" and asked_at[-1] - asked_at[0] > SOON_S:
                time.sleep(600)
            if act == "crash" and len(asked_at) == 1:
                end_soon()
            self.send_response(200)
            self.end_headers()
            if self.path == "/v1/models":
                base = {"id": "base", "root": "/base", "parent": None}
                added = [{"id": name, "root": place, "parent": "base"} for name, place in adapters.items()]
                self.wfile.write(json.dumps({"object": "list", "data": [base, *added]}).encode())
                if act == "doomed" and unloaded:
                    end_soon()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            with (folder / "asked").open("a") as file:
                file.write(f"{self.path} {body}\n")
            asked = json.loads(body)
            is_there = "missing" not in body and Path(asked.get("lora_path", ".")).exists()
            if is_there and "unload" in self.path:
                unloaded.append(adapters.pop(asked["lora_name"]))
            elif is_there:
                adapters[asked["lora_name"]] = asked["lora_path"]
            self.send_response(200 if is_there else 400)
            self.end_headers()
            self.wfile.write(b"ok" if is_there else b"no such adapter")

        def log_message(self, format: str, *args: object) -> None:
            """Be quiet."""

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
