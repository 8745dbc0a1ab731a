"""Spans of agents in whichever words their library has for them, as rows of the store.

Sources: the GenAI conventions of OpenTelemetry up to 1.27 (`gen_ai.prompt.N`), of 1.28 to 1.36 (message events)
and from 1.37 on (`gen_ai.input.messages`), OpenInference, OpenLLMetry (`traceloop.*`) and the AI SDK of Vercel
(`ai.*`). A name that none of them has is kept, and says nothing.
"""

from __future__ import annotations

import hashlib
from math import isfinite
from typing import Any, NamedTuple

import orjson

from agentloop.formats.contents import body_of, escaped, joined, split, split_event, unescaped
from agentloop.types import Span

OPERATIONS = {
    "chat": "chat",
    "completion": "chat",
    "text_completion": "chat",
    "generate_content": "chat",
    "execute_tool": "tool",
    "create_agent": "agent",
    "invoke_agent": "agent",
    "invoke_workflow": "agent",
    "llm": "chat",
    "tool": "tool",
    "tools/call": "tool",
    "agent": "agent",
    "workflow": "agent",
    "ai.generateText.doGenerate": "chat",
    "ai.streamText.doStream": "chat",
    "ai.generateObject.doGenerate": "chat",
    "ai.streamObject.doStream": "chat",
    "ai.toolCall": "tool",
    "ai.generateText": "agent",
    "ai.streamText": "agent",
}
"""What libraries call an operation -> the kind of the span."""
KINDS = (
    "gen_ai.operation.name",
    "openinference.span.kind",
    "traceloop.span.kind",
    "ai.operationId",
    "llm.request.type",
    "mcp.method.name",
)
DECISIVE = {"gen_ai.operation.name", "llm.request.type", "ai.operationId"}
"""Of these, the ones that name every operation: one that is not above is neither of the three."""
SESSIONS = (
    "gen_ai.conversation.id",
    "session.id",
    "traceloop.association.properties.session_id",
    "langfuse.session.id",
    "ai.telemetry.metadata.sessionId",
)
AGENTS = ("gen_ai.agent.name", "agent.name", "gen_ai.workflow.name", "traceloop.workflow.name")
MODELS = ("gen_ai.response.model", "gen_ai.request.model", "llm.model_name", "ai.response.model", "ai.model.id")
TOOLS = ("gen_ai.tool.name", "tool.name", "ai.toolCall.name")
PROMPT_TOKENS = (
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.prompt_tokens",
    "llm.token_count.prompt",
    "llm.usage.prompt_tokens",
    "ai.usage.promptTokens",
    "ai.usage.inputTokens",
)
COMPLETION_TOKENS = (
    "gen_ai.usage.output_tokens",
    "gen_ai.usage.completion_tokens",
    "llm.token_count.completion",
    "llm.usage.completion_tokens",
    "ai.usage.completionTokens",
    "ai.usage.outputTokens",
)
COSTS = ("agentloop.cost_usd", "gen_ai.usage.cost", "llm.cost.total", "llm.usage.cost", "operation.cost")
OK, ERROR = 1, 2
"""Codes of a span's status; 0 is unset."""
MAX_INT = 2**63 - 1
MAX_ERROR, MAX_EVENTS = 2000, 50
"""Characters of why a span failed, and events in which that is looked for; the head has all of it."""
EVENT = "event"
"""Kind of a row that is no span, but a log record said within one."""


class Where(NamedTuple):
    """What all spans of one scope share, each as JSON: a resource and a scope."""

    resource: orjson.Fragment
    scope: orjson.Fragment


class Said(NamedTuple):
    """One span as OTLP has it, its values those of Python; ids are hex, times nanoseconds since 1970."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[dict[str, Any]]
    """{"name", "time_unix_nano", "attributes"} and what else there is."""
    links: list[dict[str, Any]]
    code: int
    """The status: unset, OK or ERROR."""
    message: str
    """The status in words."""
    more: dict[str, Any]
    """Further fields that are not their default."""


def span_of(said: Said, where: Where) -> Span:
    """The row of a span. A time that runs backwards is clamped, and kept in the head as it was said.

    Raises ValueError for values that no store would hold.
    """
    start, end, attributes = said.start_ns, said.end_ns, said.attributes
    if start > MAX_INT or end > MAX_INT:
        raise ValueError("a time after the year 2262")
    bodies: list[bytes] = []
    head = split(attributes, bodies)
    if said.events:
        head["events"] = [_event(event, bodies) for event in said.events]
    if said.links:
        head["links"] = [{**link, **split(link["attributes"], bodies)} for link in said.links]
    if said.code or said.message:
        head["status"] = {"code": said.code, "message": said.message}
    head.update(said.more)
    if end < start:
        head["end_time_unix_nano"], end = end, start
    head["resource"], head["scope"] = where
    get = attributes.get
    kind = kind_of(attributes)
    return Span(
        said.trace_id,
        said.span_id,
        said.parent_id,
        said.name,
        kind,
        start,
        end,
        _error(said),
        _text(get, SESSIONS),
        _text(get, AGENTS) or (_text(get, ("traceloop.entity.name",)) if kind == "agent" else None),
        _text(get, MODELS),
        _text(get, TOOLS) or (_text(get, ("traceloop.entity.name",)) or said.name if kind == "tool" else None),
        _count(get, PROMPT_TOKENS),
        _count(get, COMPLETION_TOKENS),
        _cost(get),
        _dumps(head),
        tuple(bodies),
    )


def where_of(resource: dict[str, Any], scope: dict[str, Any]) -> Where:
    """{"attributes", and what else there is} of each; what is empty or 0 is left out."""
    return Where(*(orjson.Fragment(_dumps(_shared(item))) for item in (resource, scope)))


def event_of(said: Said, where: Where, nth: int = 0) -> Span:
    """The row of a log record that was said within a span, its parent; its id is made of what it says.

    said.more: {"body", "event_name"...}; nth: how many equal ones came before it in one request.
    """
    log = dict(said.more)
    if said.start_ns > MAX_INT:
        raise ValueError("a time after the year 2262")
    bodies: list[bytes] = []
    head = split(said.attributes, bodies)
    body = log.pop("body", None)
    head["log"] = {key: escaped(value) for key, value in log.items()}
    if body is not None:
        head["log"].update(
            split_event(said.name, body, bodies) if type(body) is dict else {"text": body_of(body, bodies)}
        )
    head["resource"], head["scope"] = where
    data = _dumps(head)
    seed = repr((said.trace_id, said.parent_id, said.name, said.start_ns, nth)).encode()
    span_id = hashlib.sha256(b"\0".join((seed, data, *bodies))).hexdigest()[:16]
    get = said.attributes.get
    columns = (_text(get, SESSIONS), _text(get, AGENTS), _text(get, MODELS), _text(get, TOOLS), 0, 0, None)
    times = (said.start_ns, said.start_ns)
    row = (said.trace_id, span_id, said.parent_id, said.name, EVENT, *times, None, *columns)
    return Span(*row, data, tuple(bodies))


def restored(span: Span, *, read: bool = False) -> dict[str, Any]:
    """What was said: `attributes`, `events`, `links`, `resource`, `scope`, `status` and further fields, without loss.

    A log record has `log` with its `body`. read: with JSON text of messages as what it says.
    """
    head: dict[str, Any] = orjson.loads(span.head)
    made: dict[str, Any] = {"attributes": joined(head, span.bodies, read=read)}
    for key in ("events", "links"):
        made[key] = [{"attributes": joined(item, span.bodies, read=read), **item} for item in head.pop(key, [])]
    for key in ("resource", "scope"):
        item = head.pop(key)
        made[key] = {"attributes": joined(item), **item}
    if "log" in head:
        log = head.pop("log")
        text = unescaped(log.pop("text", None), span.bodies)
        body = joined(log, span.bodies) if "attributes" in log or "body" in log else text
        made["log"] = {**unescaped(log), "body": body}
    return {**made, **head}


def kind_of(attributes: dict[str, Any]) -> str:
    """chat, tool, agent or other."""
    for key in KINDS:
        name = attributes.get(key)
        if type(name) is str:
            kind = OPERATIONS.get(name) or OPERATIONS.get(name.lower())
            if kind:
                return kind
            if key in DECISIVE:
                return "other"
    if "gen_ai.tool.name" in attributes:
        return "tool"
    if "gen_ai.prompt.0.role" in attributes or "gen_ai.prompt.0.content" in attributes:
        return "chat"
    if "gen_ai.agent.name" in attributes and "gen_ai.request.model" not in attributes:
        return "agent"
    return "chat" if "gen_ai.request.model" in attributes and "openinference.span.kind" not in attributes else "other"


def _shared(item: dict[str, Any]) -> dict[str, Any]:
    attributes = {key: escaped(value) for key, value in item["attributes"].items()}
    return {**{key: value for key, value in item.items() if value}, "attributes": attributes}


def _event(event: dict[str, Any], bodies: list[bytes]) -> dict[str, Any]:
    rest = {key: value for key, value in event.items() if key != "attributes"}
    rest.update(split_event(event["name"], event["attributes"], bodies))
    return rest


def _error(said: Said) -> str | None:
    if said.code == OK:
        return None
    kind = said.attributes.get("error.type")
    words = [str(kind)] if kind else []
    for event in said.events[:MAX_EVENTS]:
        if event["name"] in ("exception", "gen_ai.execute_tool.exception"):
            found = event["attributes"]
            parts = [str(found[key]) for key in ("exception.type", "exception.message") if found.get(key)]
            words.append(": ".join(parts))
    if said.code != ERROR and not words:
        return None
    words = [word for word in dict.fromkeys([*words, said.message]) if word]
    told = ": ".join(w for w in words if not any(w in other and w != other for other in words)) or "error"
    return told if len(told) <= MAX_ERROR else f"{told[:MAX_ERROR]}…"


def _text(get: Any, keys: tuple[str, ...]) -> str | None:
    for key in keys:
        value = get(key)
        if value is not None and value != "":
            return value if type(value) is str else str(value)
    return None


def _count(get: Any, keys: tuple[str, ...]) -> int:
    for key in keys:
        value = get(key)
        if value is not None:
            number = _number(value)
            return 0 if number is None else min(max(int(number), 0), MAX_INT)
    return 0


def _cost(get: Any) -> float | None:
    for key in COSTS:
        value = get(key)
        if value is not None and (number := _number(value)) is not None:
            return float(number)
    return None


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if isfinite(number) else None


def _dumps(head: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(head)
    except TypeError as error:  # text that is none, or a number of more than 64 bits
        raise ValueError(f"a value that is no JSON: {error}") from None
