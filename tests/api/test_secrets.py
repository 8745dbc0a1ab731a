"""Secrets that the service knows by their variables: not one byte of them reaches the disk."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from agentloop.store.bodies import decompress
from tests.api.serving import serving

pytestmark = pytest.mark.slow

SECRETS = {
    "BUILD_TOKEN": "plain words of a build",
    "db_password": "maple-\u00e9clair",
    "SHOP_API_KEY": "abcdefgh",
    "SIGNING_SECRET": 'quote"and\\slash',
}
"""None has the shape of a secret: they are known by the names of the variables alone."""
SETTINGS = "gourmet-cactus-07"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AGENTLOOP_POLICY__API_KEY", SETTINGS)
    monkeypatch.setenv("SHORT_KEY", "seven77")
    monkeypatch.setenv("PLACE", "an ordinary value")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_span_with_known_secrets(project: Path) -> None:
    store = project / "traces.db"
    said = [{"role": "user", "parts": [{"type": "text", "content": f"it is {v}, seven77"}]} for v in every()]
    pairs = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": json.dumps(said), "note": "an ordinary value"}
    pairs |= {f"has {n}": value for n, value in enumerate(every())}
    span = {
        "traceId": "1" * 32,
        "spanId": "2" * 16,
        "name": SECRETS["SHOP_API_KEY"],
        "attributes": [{"key": key, "value": {"stringValue": value}} for key, value in pairs.items()],
        "status": {"code": 2, "message": f"refused {SETTINGS}"},
    }
    with serving(store) as server:
        body = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
        assert httpx.post(f"{server.url}/v1/traces", json=body).json() == {}
        server.process.kill()  # so that the write-ahead log stays
        server.process.wait()
    check(store)


def test_a_file_with_known_secrets(project: Path) -> None:
    store = project / "traces.db"
    said = [{"role": "user", "content": f"it is {v}, seven77, an ordinary value"} for v in every()]
    record = {"messages": [*said, {"role": "assistant", "content": "yes"}], "metadata": {v: v for v in every()}}
    (project / "run.jsonl").write_text(json.dumps(record) + "\n")
    words = ["traces", "import", str(project / "run.jsonl"), "--store", str(store)]
    done = subprocess.run([sys.executable, "-m", "agentloop_cli", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check(store)


def every() -> list[str]:
    return [*SECRETS.values(), SETTINGS]


def check(store: Path) -> None:
    """No secret in any file as it is, nor in any value of any table, decompressed."""
    raw = [path.read_bytes() for path in store.parent.glob(f"{store.name}*")]
    assert raw
    values = list(stored(store))
    assert any(b"an ordinary value" in value for value in values), "this looks in the wrong place"
    assert any(b"seven77" in value for value in values)
    for secret in every():
        forms = {secret.encode(), *(json.dumps(secret, ensure_ascii=a)[1:-1].encode() for a in (False, True))}
        assert not [form for form in forms for data in (*raw, *values) if form in data], secret


def stored(store: Path) -> Iterator[bytes]:
    connection = sqlite3.connect(store)
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for name in names:
        for row in connection.execute(f'SELECT * FROM "{name}"'):
            for value in row:
                if isinstance(value, bytes):
                    yield value
                    try:
                        yield decompress(value)
                    except Exception:  # it is none that was compressed
                        continue
                elif isinstance(value, str):
                    yield value.encode()
    connection.close()
