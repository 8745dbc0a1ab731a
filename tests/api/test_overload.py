"""A store that is behind, locked or full: clients are told when to come back, and nothing acknowledged is lost."""

from __future__ import annotations

import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import parts
import pytest

from agentloop.api import ingest
from agentloop.store import commits

from .serving import SPAN, bearer, dumped, make_key, numbered, posted, raw, request, serving, serving_here, status

pytestmark = pytest.mark.slow


@contextmanager
def locked(store: Path) -> Iterator[None]:
    """Another writer, which does not end."""
    with closing(sqlite3.connect(store, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield


def retry_after(got: bytes) -> int:
    lines = got.lower().partition(b"\r\n\r\n")[0].split(b"\r\n")
    return int(next(line.split(b":")[1] for line in lines if line.startswith(b"retry-after:")))


def test_more_than_may_wait_is_told_to_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "MAX_WAITING", 1000)
    monkeypatch.setattr(ingest, "ANSWER_S", 30.0)
    path = tmp_path / "traces.db"
    body = dumped(request(numbered(1, name="x" * 600)))
    with serving_here(path) as port:
        answers: list[int] = []
        with locked(path):
            first = threading.Thread(target=lambda: answers.append(status(raw(port, posted(body), timeout_s=30))))
            first.start()
            time.sleep(0.5)
            got = raw(port, posted(body))
            assert (status(got), retry_after(got)) == (429, ingest.BUSY_S)
        first.join()
        assert answers == [200]
        assert status(raw(port, posted(body))) == 200


def test_bodies_on_their_way_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "MAX_READING", 1000)
    with serving_here(tmp_path / "traces.db") as port:
        got = raw(port, posted(b" " * 1001))
        assert (status(got), retry_after(got)) == (429, ingest.BUSY_S)
        assert status(raw(port, posted(dumped(request(SPAN))))) == 200, "what was refused is on its way no more"


def test_a_locked_store_is_told_before_clients_give_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "ANSWER_S", 0.5)
    path = tmp_path / "traces.db"
    with serving_here(path) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        assert client.get("/readyz").status_code == 200
        with locked(path):
            told = client.post("/v1/traces", json=request(SPAN))
            assert (told.status_code, told.headers["retry-after"]) == (503, str(ingest.BROKEN_S))
            assert "retry" in told.json()["message"]
            ready = client.get("/readyz")
            assert (ready.status_code, ready.headers["retry-after"]) == (503, "5")
            assert client.get("/healthz").status_code == 200
            assert client.get("/api/v1/traces").status_code == 200, "reading waits for no writer"
        for _ in range(50):
            told = client.post("/v1/traces", json=request(SPAN))
            if told.status_code == 200:
                break
            time.sleep(0.1)
        assert told.status_code == 200
        assert client.get("/readyz").status_code == 200
        assert client.get(f"/api/v1/traces/{SPAN['traceId']}").json()["span_ids"] == [SPAN["spanId"]]


def test_readiness_asks_for_a_write_and_waits_two_seconds(tmp_path: Path) -> None:
    path = tmp_path / "traces.db"
    with serving_here(path) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        with locked(path):
            began = time.monotonic()
            told = [client.get("/readyz") for _ in range(2)]
            assert [answer.status_code for answer in told] == [503, 503]
            assert "within 2 s" in told[0].text
            assert time.monotonic() - began < 8
        for _ in range(100):
            if client.get("/readyz").status_code == 200:
                return
            time.sleep(0.1)
        raise AssertionError("it never was ready again")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with parts.small_disk(tmp_path / "disk", "2m") as folder:
        yield folder


def test_a_full_disk_is_told_and_nothing_acknowledged_is_lost(small_disk: Path) -> None:
    taken = []
    with serving(small_disk / "traces.db") as server, httpx.Client(base_url=server.url, timeout=30) as client:
        assert client.get("/readyz").status_code == 200
        for n in range(1, 500):
            told = client.post("/v1/traces", json=request(numbered(n, name=f"{n} " * 5000)))
            if told.status_code != 200:
                break
            taken.append(f"{n:016x}")
        assert (told.status_code, told.headers["retry-after"]) == (503, str(ingest.BROKEN_S))
        assert "full" in told.json()["message"]
        assert taken
        ready = client.get("/readyz")
        assert (ready.status_code, "full" in ready.text) == (503, True)
        at = f"/api/v1/traces/{SPAN['traceId']}"
        assert client.get(at).json()["span_ids"] == taken, "what is there can be read"
        subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
        assert client.post("/v1/traces", json=request(numbered(999))).status_code == 200
        assert client.get("/readyz").status_code == 200
        assert client.get(at).json()["span_ids"] == [*taken, f"{999:016x}"]
    assert "Traceback" not in server.said, server.said


def test_keys_are_in_no_log(tmp_path: Path) -> None:
    path = tmp_path / "traces.db"
    words, _ = make_key(path, "mine", "ingest")
    unknown = words[:-4] + "AAAA"
    with serving(path) as server, httpx.Client(base_url=server.url) as client:
        for key in (words, unknown):
            for headers in (bearer(key), {"X-API-Key": key}, {"Authorization": key}, {"Authorization": f"Basic {key}"}):
                client.post("/v1/traces", json=request(SPAN), headers=headers)
                client.get("/api/v1/traces", headers=headers)
                client.put("/api/v1/traces/x/reward", content=b"{", headers=headers)
            client.get("/api/v1/traces", params={"api_key": key, "filter": key})
            raw(
                server.port, f"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nbad\r\n\r\n".encode()
            )
            raw(server.port, f"{key} / HTTP/9\r\n\r\n".encode())
        (tmp_path / "traces.db-wal").unlink()
        path.unlink()  # and where everything fails
        client.post("/v1/traces", json=request(SPAN), headers=bearer(words))
    secret = words.split("_", 2)[2]
    assert secret[:20] not in server.said
    assert secret[:20] not in path.read_text(errors="replace") if path.exists() else True
