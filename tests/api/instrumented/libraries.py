"""The libraries that tell of a program in spans, each set up as its manual says, over the real OTLP exporters."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import Any

from opentelemetry import _logs, trace
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from tests.api.instrumented.clients import Call

Function = Callable[..., str]
SESSION = "session-1"


class Library:
    """Sets up the exporters; `agent` and `tool` decorate functions, and here leave them alone."""

    def __init__(self, url: str) -> None:
        self.spans = TracerProvider()
        self.spans.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces", compression=Compression.Gzip))
        )
        trace.set_tracer_provider(self.spans)
        self.logs = LoggerProvider()
        self.logs.add_log_record_processor(
            BatchLogRecordProcessor(OTLPLogExporter(f"{url}/v1/logs", compression=Compression.Gzip))
        )
        _logs.set_logger_provider(self.logs)
        self.trace_id = ""

    def stop(self) -> None:
        self.spans.shutdown()
        self.logs.shutdown()

    def agent(self, name: str) -> Callable[[Function], Function]:
        return lambda function: function

    def tool(self, name: str) -> Callable[[Function], Function]:
        return lambda function: function

    def main(self, function: Function) -> Function:
        """All in one trace."""

        @wraps(function)
        def run(*words: str) -> str:
            with self.spans.get_tracer("program").start_as_current_span("main") as span:
                self.note(span)
                return function(*words)

        return run

    def note(self, span: trace.Span) -> None:
        self.trace_id = format(span.get_span_context().trace_id, "032x")

    def call(self, tool: Function, call: Call) -> str:
        """Run a tool that a model called."""
        return tool(**call.arguments)


class OpenInference(Library):
    """Arize's; agents and tools by the decorators of its tracer."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        from openinference.instrumentation import OITracer, TraceConfig
        from openinference.instrumentation.anthropic import AnthropicInstrumentor
        from openinference.instrumentation.openai import OpenAIInstrumentor

        OpenAIInstrumentor().instrument(tracer_provider=self.spans)
        AnthropicInstrumentor().instrument(tracer_provider=self.spans)
        self.tracer: Any = OITracer(self.spans.get_tracer("program"), TraceConfig())

    def agent(self, name: str) -> Callable[[Function], Function]:
        made: Callable[[Function], Function] = self.tracer.agent(name=name)
        return made

    def tool(self, name: str) -> Callable[[Function], Function]:
        made: Callable[[Function], Function] = self.tracer.tool(name=name)
        return made

    def main(self, function: Function) -> Function:
        from openinference.instrumentation import using_session

        @wraps(function)
        def run(*words: str) -> str:
            with using_session(SESSION):
                return super(OpenInference, self).main(function)(*words)

        return run


class OpenLLMetry(Library):
    """Traceloop's instrumentations alone, in an application that has spans of its own."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        from opentelemetry.instrumentation.anthropic import AnthropicInstrumentor
        from opentelemetry.instrumentation.openai import OpenAIInstrumentor

        OpenAIInstrumentor().instrument()
        AnthropicInstrumentor().instrument()


class Traceloop(Library):
    """Traceloop's SDK: its decorators, and the instrumentations that it turns on by itself."""

    def __init__(self, url: str) -> None:
        from traceloop.sdk import Traceloop
        from traceloop.sdk.instruments import Instruments

        self.trace_id = ""
        Traceloop.init(
            app_name="program",
            exporter=OTLPSpanExporter(f"{url}/v1/traces", compression=Compression.Gzip),
            instruments={Instruments.OPENAI, Instruments.ANTHROPIC},
        )

    def stop(self) -> None:
        trace.get_tracer_provider().shutdown()  # type: ignore[attr-defined]

    def agent(self, name: str) -> Callable[[Function], Function]:
        from traceloop.sdk.decorators import agent

        made: Callable[[Function], Function] = agent(name=name)
        return made

    def tool(self, name: str) -> Callable[[Function], Function]:
        from traceloop.sdk.decorators import tool

        made: Callable[[Function], Function] = tool(name=name)
        return made

    def main(self, function: Function) -> Function:
        from traceloop.sdk import Traceloop
        from traceloop.sdk.decorators import workflow

        @workflow(name="main")
        def run(*words: str) -> str:
            Traceloop.set_association_properties({"session_id": SESSION})
            self.note(trace.get_current_span())
            return function(*words)

        made: Function = run
        return made


class OfficialV2(Library):
    """OpenTelemetry's first one for OpenAI, in an application that has spans of its own."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor

        OpenAIInstrumentor().instrument()


class Official(Library):
    """OpenTelemetry's present one for OpenAI; agents and tools by its `util-genai`, where calls have their ids."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        from opentelemetry.instrumentation.genai.openai import OpenAIInstrumentor
        from opentelemetry.util.genai.handler import TelemetryHandler

        OpenAIInstrumentor().instrument()
        self.handler = TelemetryHandler(instrumentation_scope_name="program")

    def agent(self, name: str) -> Callable[[Function], Function]:
        def decorate(function: Function) -> Function:
            @wraps(function)
            def run(*words: str) -> str:
                with self.handler.invoke_local_agent(agent_name=name, conversation_id=SESSION):
                    return function(*words)

            return run

        return decorate

    def call(self, tool: Function, call: Call) -> str:
        with self.handler.tool(call.name) as invocation:
            invocation.tool_call_id = call.id
            invocation.tool_call_arguments = json.dumps(call.arguments)
            result = super().call(tool, call)
            invocation.tool_call_result = result
            return result


LIBRARIES: dict[str, type[Library]] = {
    "openinference": OpenInference,
    "openllmetry": OpenLLMetry,
    "traceloop": Traceloop,
    "official": Official,
    "official-v2": OfficialV2,
}
