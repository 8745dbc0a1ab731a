"""OTLP as protobuf, taken apart. Messages of the `opentelemetry-proto` package, version 1 of the protocol."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from agentloop.errors import FormatError
from agentloop.formats.genai import Said, Where, where_of

NO_TRACE, NO_SPAN = bytes(16), bytes(8)
Found = Iterator[tuple[Said | ValueError, Where]]


def spans(body: bytes) -> Found:
    """Each span, or why it is none. Raises FormatError when the body is no OTLP."""
    try:
        request = ExportTraceServiceRequest.FromString(body)
    except DecodeError:  # one text that is no UTF-8 spoils all of it, unless each span is read by itself
        return _one_by_one(body)
    return _spans(request)


def logs(body: bytes) -> Found:
    """Each log record. Raises FormatError when the body is no OTLP."""
    try:
        request = ExportLogsServiceRequest.FromString(body)
    except DecodeError as error:
        raise FormatError(f"no OTLP logs: {error}") from None
    return _logs(request)


def _spans(request: ExportTraceServiceRequest) -> Found:
    for of_resource in request.resource_spans:
        for of_scope in of_resource.scope_spans:
            where = _where(of_resource, of_scope)
            for span in of_scope.spans:
                yield _said(span), where


def _logs(request: ExportLogsServiceRequest) -> Found:
    for of_resource in request.resource_logs:
        for of_scope in of_resource.scope_logs:
            where = _where(of_resource, of_scope)
            for record in of_scope.log_records:
                try:
                    yield _record(record), where
                except ValueError as error:
                    yield error, where


def _said(span: trace_pb2.Span) -> Said | ValueError:
    trace_id, span_id, parent_id = span.trace_id, span.span_id, span.parent_span_id
    if len(trace_id) != 16 or trace_id == NO_TRACE:
        return ValueError(f"trace id {trace_id[:20].hex() or 'missing'}: not 16 bytes that are not all zero")
    if len(span_id) != 8 or span_id == NO_SPAN:
        return ValueError(f"span id {span_id[:20].hex() or 'missing'}: not 8 bytes that are not all zero")
    if len(parent_id) not in (0, 8):
        return ValueError(f"parent span id {parent_id[:20].hex()}: not 8 bytes")
    try:
        return Said(
            trace_id.hex(),
            span_id.hex(),
            parent_id.hex() if parent_id and parent_id != NO_SPAN else None,
            span.name,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            _attributes(span.attributes),
            [_event(event) for event in span.events],
            [_link(link) for link in span.links],
            span.status.code,
            span.status.message,
            _more(span),
        )
    except ValueError as error:
        return error


def _more(span: trace_pb2.Span) -> dict[str, Any]:
    more: dict[str, Any] = {"kind": span.kind}
    if span.flags:
        more["flags"] = span.flags
    if span.trace_state:
        more["trace_state"] = span.trace_state
    if span.dropped_attributes_count:
        more["dropped_attributes_count"] = span.dropped_attributes_count
    if span.dropped_events_count:
        more["dropped_events_count"] = span.dropped_events_count
    if span.dropped_links_count:
        more["dropped_links_count"] = span.dropped_links_count
    return more


def _event(event: trace_pb2.Span.Event) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": event.name,
        "time_unix_nano": event.time_unix_nano,
        "attributes": _attributes(event.attributes),
    }
    if event.dropped_attributes_count:
        made["dropped_attributes_count"] = event.dropped_attributes_count
    return made


def _link(link: trace_pb2.Span.Link) -> dict[str, Any]:
    made: dict[str, Any] = {
        "trace_id": link.trace_id.hex(),
        "span_id": link.span_id.hex(),
        "attributes": _attributes(link.attributes),
    }
    if link.trace_state:
        made["trace_state"] = link.trace_state
    if link.flags:
        made["flags"] = link.flags
    if link.dropped_attributes_count:
        made["dropped_attributes_count"] = link.dropped_attributes_count
    return made


def _record(record: Any) -> Said:
    trace_id, span_id = record.trace_id, record.span_id
    if len(trace_id) != 16 or trace_id == NO_TRACE:
        raise ValueError("a log record that belongs to no trace")
    if len(span_id) not in (0, 8):
        raise ValueError(f"span id {span_id[:20].hex()}: not 8 bytes")
    attributes = _attributes(record.attributes)
    log: dict[str, Any] = {"body": _value(record.body)}
    if record.observed_time_unix_nano:
        log["observed_time_unix_nano"] = record.observed_time_unix_nano
    if record.severity_number:
        log["severity_number"] = record.severity_number
    if record.severity_text:
        log["severity_text"] = record.severity_text
    if record.event_name:
        log["event_name"] = record.event_name
    if record.flags:
        log["flags"] = record.flags
    if record.dropped_attributes_count:
        log["dropped_attributes_count"] = record.dropped_attributes_count
    parent_id = span_id.hex() if span_id and span_id != NO_SPAN else None
    name = record.event_name or str(attributes.get("event.name") or "")
    time = record.time_unix_nano or record.observed_time_unix_nano
    return Said(trace_id.hex(), "", parent_id, name, time, time, attributes, [], [], 0, "", log)


def _attributes(pairs: Iterable[common_pb2.KeyValue]) -> dict[str, Any]:
    made = {}
    for pair in pairs:
        value = pair.value
        which = value.WhichOneof("value")
        made[pair.key] = value.string_value if which == "string_value" else _value(value)
    return made


def _value(value: common_pb2.AnyValue) -> Any:
    """The value in Python, None for one that is empty. Protobuf itself bounds its depth."""
    which = value.WhichOneof("value")
    if which is None:
        return None
    if which == "array_value":
        return [_value(item) for item in value.array_value.values]
    if which == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    if which.endswith("_strindex"):
        raise ValueError("a value that points into a table of strings, which traces do not have")
    return getattr(value, which)


def _where(of_resource: Any, of_scope: Any) -> Where:
    resource, scope = of_resource.resource, of_scope.scope
    return where_of(
        {
            "attributes": _attributes(resource.attributes),
            "dropped_attributes_count": resource.dropped_attributes_count,
            "schema_url": of_resource.schema_url,
        },
        {
            "name": scope.name,
            "version": scope.version,
            "attributes": _attributes(scope.attributes),
            "dropped_attributes_count": scope.dropped_attributes_count,
            "schema_url": of_scope.schema_url,
        },
    )


def _one_by_one(body: bytes) -> Found:
    """The spans of a body that protobuf refuses as a whole."""
    try:
        request = _lenient().FromString(body)
    except DecodeError as error:
        raise FormatError(f"no OTLP traces: {error}") from None
    if not any(of_scope.spans for of_resource in request.resource_spans for of_scope in of_resource.scope_spans):
        raise FormatError("no OTLP traces: nothing in it can be read")
    return _parsed(request)


def _parsed(request: Any) -> Found:
    for of_resource in request.resource_spans:
        made = trace_pb2.ResourceSpans(schema_url=of_resource.schema_url)
        try:
            made.resource.CopyFrom(resource_pb2.Resource.FromString(of_resource.resource))
        except DecodeError:
            made.resource.dropped_attributes_count = 1
        for of_scope in of_resource.scope_spans:
            scope = trace_pb2.ScopeSpans(schema_url=of_scope.schema_url)
            try:
                scope.scope.CopyFrom(common_pb2.InstrumentationScope.FromString(of_scope.scope))
            except DecodeError:
                scope.scope.dropped_attributes_count = 1
            where = _where(made, scope)
            for data in of_scope.spans:
                try:
                    yield _said(trace_pb2.Span.FromString(data)), where
                except DecodeError:
                    yield ValueError("a span that cannot be read, such as one with text that is no UTF-8"), where


@cache
def _lenient() -> Any:
    """ExportTraceServiceRequest with bytes where the real one has resources, scopes and spans; the wire is the same."""
    file = descriptor_pb2.FileDescriptorProto(name="agentloop/otlp_lenient.proto", package="agentloop", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto
    layout: dict[str, list[tuple[str, int, str | None, bool]]] = {
        "Scopes": [("scope", 1, None, False), ("spans", 2, None, True), ("schema_url", 3, "text", False)],
        "Resources": [
            ("resource", 1, None, False),
            ("scope_spans", 2, "Scopes", True),
            ("schema_url", 3, "text", False),
        ],
        "Request": [("resource_spans", 1, "Resources", True)],
    }
    for name, fields in layout.items():
        message = file.message_type.add(name=name)
        for key, number, kind, repeated in fields:
            made = message.field.add(name=key, number=number)
            made.label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            made.type = {None: field.TYPE_BYTES, "text": field.TYPE_STRING}.get(kind, field.TYPE_MESSAGE)
            if made.type == field.TYPE_MESSAGE:
                made.type_name = f".agentloop.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("agentloop.Request"))
