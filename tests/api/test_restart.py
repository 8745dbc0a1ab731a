"""An application goes on while the service is away: the SDK sends again, and what comes twice is stored once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, Thread

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

from .serving import Server, serving

pytestmark = pytest.mark.slow


class Exporter(OTLPSpanExporter):
    """Remembers how each batch ended.

    What the SDK loses by itself: a batch that it could not send within `timeout` (10 s unless told otherwise), the
    oldest of more than `max_queue_size` spans that wait (2048), and what still waits when the program ends.
    """

    def __init__(self, url: str) -> None:
        super().__init__(f"{url}/v1/traces", timeout=60)
        self.ended: list[SpanExportResult] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        self.ended.append(result)
        return result


def test_spans_of_a_program_that_goes_on_while_the_server_is_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path / "traces.db") as first:
        exporter = Exporter(first.url)
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=100_000, schedule_delay_millis=50, max_export_batch_size=16)
        )
        sent: list[str] = []
        ended = Event()

        def work() -> None:
            tracer = provider.get_tracer("program")
            with tracer.start_as_current_span("main") as main:
                trace.append(format(main.get_span_context().trace_id, "032x"))
                while not ended.wait(0.01):
                    with tracer.start_as_current_span(f"step {len(sent)}") as span:
                        sent.append(format(span.get_span_context().span_id, "016x"))
            sent.append(format(main.get_span_context().span_id, "016x"))

        trace: list[str] = []
        program = Thread(target=work)
        program.start()
        try:
            until(lambda: len(exporter.ended) > 3)
            first.process.kill()
            first.process.wait()
            n_before = len(sent)
            until(lambda: "Transient error" in caplog.text)
            until(lambda: len(sent) > n_before + 20)
            with serving(tmp_path / "traces.db", port=first.port) as second:
                n_ended = len(exporter.ended)
                until(lambda: len(exporter.ended) > n_ended)
                ended.set()
                program.join()
                provider.shutdown()
                assert stored(second, trace[0]) == sorted(sent)
        finally:
            ended.set()
            program.join()
            provider.shutdown()
    assert {*exporter.ended} == {SpanExportResult.SUCCESS}
    assert "dropping" not in caplog.text


def until(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it never came to that")


def stored(server: Server, trace_id: str) -> list[str]:
    """The ids of all spans of the trace as rows, in order, so that one that is stored twice would be there twice."""
    rows, cursor = [], None
    while True:
        given = {"limit": 1000} | ({"cursor": cursor} if cursor else {})
        page = httpx.get(f"{server.url}/api/v1/traces/{trace_id}/spans", params=given).json()
        rows += [row["span_id"] for row in page["spans"]]
        if (cursor := page["next"]) is None:
            return sorted(rows)
