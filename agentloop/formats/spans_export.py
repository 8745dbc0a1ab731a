"""Spans from a trace, in the words of the GenAI conventions; what these have no word for is `agentloop.*`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from agentloop.formats.genai import ERROR, EVENT, Said, restored, span_of, where_of
from agentloop.types import Message, Span, Step, Trace

MAX_CONTEXT = 256
"""Messages of a context that each call of a model repeats; a longer run writes down only what was new."""
WHERE = where_of(
    {"attributes": {"service.name": "agentloop"}},
    {"name": "agentloop", "attributes": {}},
)
INTERNAL, CLIENT = 1, 3
"""Kinds of OpenTelemetry spans."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def spans_of(trace: Trace) -> list[Span]:
    """One span for the agent, below it one for each step and each result, and the children's.

    `trace_of` gives an equal trace back, but for these: times are whole microseconds in UTC and durations whole
    nanoseconds; a message has the fields that its role has (a tool's content, id and name; others content,
    reasoning, calls and tokens); and an answer's tokens are the completion's. Ids are made of the trace's.
    """
    trace_id = trace.id if re.fullmatch("[0-9a-f]{32}", trace.id) and trace.id.strip("0") else _hash(trace.id, 32)
    return _agent(trace, trace_id, None, {})


def encode(spans: Sequence[Span]) -> bytes:
    """An ExportTraceServiceRequest. Log records become events of their span, and go with it when it is not there."""
    request = ExportTraceServiceRequest()
    logs: dict[str | None, list[Span]] = {}
    for span in spans:
        if span.kind == EVENT:
            logs.setdefault(span.parent_id, []).append(span)
    scopes: dict[str, Any] = {}
    for span in spans:
        if span.kind == EVENT:
            continue
        said = restored(span)
        key = repr((said["resource"], said["scope"]))
        if key not in scopes:
            scopes[key] = _scope(request, said["resource"], said["scope"])
        said["events"] += [_logged(log) for log in logs.get(span.span_id, ())]
        _encode(scopes[key].spans.add(), span, said)
    made: bytes = request.SerializeToString()
    return made


def _agent(trace: Trace, trace_id: str, parent_id: str | None, more: dict[str, Any]) -> list[Span]:
    span_id = _hash(f"{parent_id}:{trace.id}:{more.get('agentloop.child')}", 16)
    attributes = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": trace.agent,
        "gen_ai.conversation.id": trace.session,
        "gen_ai.input.messages": [_told(message) for message in trace.messages],
        "agentloop.trace.id": trace.id,
        "agentloop.episode_id": trace.episode_id,
        "agentloop.task_id": trace.task_id,
        "agentloop.policy_version": trace.policy_version,
        "agentloop.isolation": trace.isolation,
        "agentloop.source": trace.source,
        "agentloop.source_id": trace.source_id,
        "agentloop.answer": trace.answer,
        "agentloop.stop_reason": trace.stop_reason.value,
        "agentloop.error": trace.error,
        **more,
    }
    times = (trace.started_at, trace.duration_s)
    name = f"invoke_agent {trace.agent}" if trace.agent else "invoke_agent"
    made = [_span(trace_id, span_id, parent_id, name, times, attributes, trace.error)]
    context = list(trace.messages)
    for step in trace.steps:
        made += _step(step, trace_id, span_id, context)
    for n, child in enumerate(trace.children):
        link = {"agentloop.child": n, "agentloop.step": child.step, "agentloop.call_id": child.call_id}
        made += _agent(child.trace, trace_id, span_id, link)
    return made


def _step(step: Step, trace_id: str, parent_id: str, context: list[Message]) -> list[Span]:
    context += step.heard
    completion, message = step.completion, step.completion.message
    told = context if len(context) <= MAX_CONTEXT else step.heard
    output = {**_told(message), "finish_reason": completion.finish_reason}
    output.pop("token_ids", None)
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.response.model": completion.model,
        "gen_ai.response.finish_reasons": [completion.finish_reason],
        "gen_ai.usage.input_tokens": completion.n_prompt_tokens,
        "gen_ai.usage.output_tokens": completion.n_completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": completion.n_cached_tokens,
        "gen_ai.input.messages": [_told(message) for message in told],
        "gen_ai.output.messages": [output],
        "agentloop.cost_usd": completion.cost_usd,
        "agentloop.token_ids.prompt": list(completion.prompt_token_ids) or None,
        "agentloop.token_ids.completion": list(message.token_ids) or None,
        "agentloop.logprobs": list(completion.logprobs) or None,
        "agentloop.step": step.index,
        "agentloop.n_heard": len(step.heard),
        "agentloop.compacted": step.compacted or None,
        "agentloop.copied": step.copied or None,
    }
    name = f"chat {completion.model}" if completion.model else "chat"
    span_id = _hash(f"{parent_id}:{step.index}", 16)
    made = [_span(trace_id, span_id, parent_id, name, (step.started_at, step.duration_s), attributes, None)]
    context.append(message)
    calls = {call.id: call for call in message.tool_calls}
    started = None if step.started_at is None else _ns(step.started_at) + round(step.duration_s * 1e9)
    for n, result in enumerate(step.results):
        call = calls.get(result.call_id)
        given = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": result.name,
            "gen_ai.tool.call.id": result.call_id,
            "gen_ai.tool.call.arguments": call and call.arguments,
            "gen_ai.tool.call.result": result.content,
            "agentloop.step": step.index,
            "agentloop.exit_code": result.exit_code,
            "agentloop.timed_out": result.timed_out,
        }
        error = None if result.ok else "timeout" if result.timed_out else "tool_error"
        times = (started, result.duration_s)
        made.append(
            _span(trace_id, _hash(f"{span_id}:{n}", 16), parent_id, f"execute_tool {result.name}", times, given, error)
        )
        context.append(Message(role="tool", content=result.content, tool_call_id=result.call_id, name=result.name))
    return made


def _told(message: Message) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    if message.reasoning:
        parts.append({"type": "reasoning", "content": message.reasoning})
    if message.role == "tool":
        part = {"type": "tool_call_response", "id": message.tool_call_id, "result": message.content}
        parts.append({key: value for key, value in part.items() if value is not None})
    elif message.content:
        parts.append({"type": "text", "content": message.content})
    for call in message.tool_calls:
        made = {"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.arguments, "error": call.error}
        parts.append({key: value for key, value in made.items() if value is not None})
    told: dict[str, Any] = {"role": message.role, "parts": parts}
    if message.name is not None:
        told["name"] = message.name
    if message.token_ids:
        told["token_ids"] = list(message.token_ids)
    return told


def _span(
    trace_id: str,
    span_id: str,
    parent_id: str | None,
    name: str,
    times: tuple[datetime | int | None, float],
    attributes: dict[str, Any],
    error: str | None,
) -> Span:
    start = _ns(times[0]) if isinstance(times[0], datetime) else times[0] or 0
    given = {key: value for key, value in attributes.items() if value is not None}
    for key in ("gen_ai.input.messages", "gen_ai.output.messages"):
        if key in given:  # as JSON text, which is what the conventions ask of spans
            given[key] = json.dumps(given[key], ensure_ascii=False, separators=(",", ":"))
    if error is not None and given["gen_ai.operation.name"] == "execute_tool":
        given["error.type"] = error
    given = {key: _utf8(value) if isinstance(value, str) else value for key, value in given.items()}
    kind = CLIENT if given["gen_ai.operation.name"] == "chat" else INTERNAL
    end = start + round(times[1] * 1e9)
    code, words = (ERROR, _utf8(error)) if error is not None else (0, "")
    said = Said(trace_id, span_id, parent_id, _utf8(name), start, end, given, [], [], code, words, {"kind": kind})
    return span_of(said, WHERE)


def _utf8(text: str) -> str:
    """Without halves of surrogate pairs, which no protobuf can hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _ns(time: datetime) -> int:
    since = time - EPOCH
    return ((since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds) * 1000


def _hash(text: str, n_digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:n_digits]


def _scope(request: ExportTraceServiceRequest, resource: dict[str, Any], scope: dict[str, Any]) -> Any:
    of_resource = request.resource_spans.add()
    _fill(of_resource.resource, resource)
    of_resource.schema_url = resource.get("schema_url", "")
    of_scope = of_resource.scope_spans.add()
    _fill(of_scope.scope, scope)
    of_scope.scope.name, of_scope.scope.version = scope.get("name", ""), scope.get("version", "")
    of_scope.schema_url = scope.get("schema_url", "")
    return of_scope


def _encode(made: trace_pb2.Span, span: Span, said: dict[str, Any]) -> None:
    made.trace_id, made.span_id = bytes.fromhex(span.trace_id), bytes.fromhex(span.span_id)
    made.parent_span_id = bytes.fromhex(span.parent_id or "")
    made.name = span.name
    made.start_time_unix_nano = span.start_ns
    made.end_time_unix_nano = said.get("end_time_unix_nano", span.end_ns)
    made.kind = said.get("kind", 0)
    made.flags, made.trace_state = said.get("flags", 0), said.get("trace_state", "")
    made.dropped_events_count = said.get("dropped_events_count", 0)
    made.dropped_links_count = said.get("dropped_links_count", 0)
    _fill(made, said)
    status = said.get("status", {})
    made.status.code, made.status.message = status.get("code", 0), status.get("message", "")
    for item in said["events"]:
        event = made.events.add(name=item["name"], time_unix_nano=item["time_unix_nano"])
        _fill(event, item)
    for item in said["links"]:
        link = made.links.add(trace_state=item.get("trace_state", ""), flags=item.get("flags", 0))
        link.trace_id, link.span_id = bytes.fromhex(item["trace_id"]), bytes.fromhex(item["span_id"])
        _fill(link, item)


def _logged(log: Span) -> dict[str, Any]:
    said = restored(log)
    body = said["log"].get("body")
    more = body if isinstance(body, dict) else {} if body is None else {"content": body}
    name = log.name or "log"
    return {"name": name, "time_unix_nano": log.start_ns, "attributes": said["attributes"] | more}


def _fill(made: Any, item: dict[str, Any]) -> None:
    made.dropped_attributes_count = item.get("dropped_attributes_count", 0)
    made.attributes.extend(_pairs(item["attributes"]))


def _pairs(attributes: dict[str, Any]) -> Iterable[common_pb2.KeyValue]:
    return [common_pb2.KeyValue(key=key, value=_value(value)) for key, value in attributes.items()]


def _value(value: Any) -> common_pb2.AnyValue:
    match value:
        case None:
            return common_pb2.AnyValue()
        case bool():
            return common_pb2.AnyValue(bool_value=value)
        case int():
            return common_pb2.AnyValue(int_value=value)
        case float():
            return common_pb2.AnyValue(double_value=value)
        case str():
            return common_pb2.AnyValue(string_value=value)
        case bytes():
            return common_pb2.AnyValue(bytes_value=value)
        case list():
            return common_pb2.AnyValue(array_value=common_pb2.ArrayValue(values=map(_value, value)))
        case _:
            return common_pb2.AnyValue(kvlist_value=common_pb2.KeyValueList(values=_pairs(value)))
