"""One trace, or two side by side, in a file: it runs nothing, refers to nothing, and stays small."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from agentloop.errors import ConfigError
from agentloop.formats.export import load_exporter
from agentloop.otel.stored_trace import StoredTrace
from agentloop.reports.trace_file import MAX_BYTES, HtmlFile, page_of
from agentloop.store.store import Store
from agentloop.views.trace_page import summary_of
from tests.views.stored import PROJECT, failure, put, put_as_spans, step, trace

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store.db")


def stored(store: Store, trace_id: str) -> StoredTrace:
    return StoredTrace(store, summary_of(store.row(PROJECT, trace_id)))


def test_the_policy_of_a_file_allows_its_one_style_and_nothing_else(store: Store) -> None:
    trace_id = put(store, trace("a", step(0, HOSTILE)), failure(0, "alert(1)", critical=True))
    html = page_of([stored(store, trace_id)])
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:" in html
    assert "<script" not in html
    assert "<img" not in html
    assert '<mark class="evidence">alert(1)</mark>' in html
    assert not re.search(r'(?:src|href)="(?!#|data:,)', html)


@pytest.mark.parametrize("as_spans", [False, True])
def test_the_exporter_writes_a_trace_of_any_form(store: Store, as_spans: bool) -> None:
    one = trace("a", step(0, "some words"))
    trace_id = put_as_spans(store, one) if as_spans else put(store, one)
    (html,) = load_exporter("html").write([stored(store, trace_id)])
    assert b"some words" in html


def test_two_traces_are_compared(store: Store) -> None:
    ids = [put(store, trace(name, step(0, "", ("shell", "{}", name)))) for name in ("one", "two")]
    html = page_of([stored(store, trace_id) for trace_id in ids])
    assert "They part at step 0: the same action had another result." in html
    assert "/traces/" not in html


def test_more_than_two_are_refused(store: Store) -> None:
    trace_id = put(store, trace("a", step(0, "x")))
    with pytest.raises(ConfigError, match="at most two ids"):
        list(HtmlFile().write([stored(store, trace_id)] * 3))


def test_a_large_trace_is_cut_to_the_limit_with_its_failure(store: Store) -> None:
    steps = [step(n, f"step {n} " + "<&>" * 5000) for n in range(400)]
    trace_id = put(store, trace("large", *steps), failure(390, "step 390", critical=True))
    html = page_of([stored(store, trace_id)])
    assert len(html.encode()) <= MAX_BYTES
    assert '<mark class="evidence">step 390</mark>' in html
    assert "parts are left out of this file" in html
