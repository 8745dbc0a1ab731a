"""Spans of agents as rows of the store, and what a row was made of. Which words say what: `attributes.py`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

from agentloop.otel.attributes import (
    COMPLETION_TOKENS,
    MAX_INT,
    MODELS,
    PROMPT_TOKENS,
    RESPONSE_IDS,
    Links,
    agent_of,
    cost_of,
    count_of,
    kind_of,
    links_of,
    text_of,
    tool_name_of,
)
from agentloop.otel.contents import body_of, dumped, escaped, joined, split, split_event, unescaped
from agentloop.types import Span

OK, ERROR = 1, 2
"""Codes of a span's status; 0 is unset."""
MAX_ERROR, MAX_EVENTS = 2000, 50
"""Characters of why a span failed, and events in which that is looked for; the head has all of it."""
_ID = re.compile(r'\{\s*"id"\s*:\s*"([^"\\]+)"')
EVENT = "event"
"""Kind of a row that is no span, but a log record said within one."""


class Where(NamedTuple):
    """What all spans of one scope share: a resource and a scope as JSON, and what the resource says of links."""

    resource: orjson.Fragment
    scope: orjson.Fragment
    links: Links


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
    head["resource"], head["scope"] = where.resource, where.scope
    get = attributes.get
    kind = kind_of(attributes)
    links = links_of(attributes, where.links)
    return Span(
        said.trace_id,
        said.span_id,
        said.parent_id,
        said.name,
        kind,
        start,
        end,
        _error(said),
        links.session,
        agent_of(attributes, kind, said.name),
        text_of(get, MODELS),
        tool_name_of(attributes, kind, said.name),
        count_of(get, PROMPT_TOKENS),
        count_of(get, COMPLETION_TOKENS),
        cost_of(get),
        _dumps(head),
        tuple(bodies),
        *links[1:],
        _response_id(get) if kind == "chat" else None,
    )


def _response_id(get: Callable[[str], Any]) -> str | None:
    """Of an answer as the model's service gave it, which is all that OpenInference has of it, too."""
    said = text_of(get, RESPONSE_IDS)
    if said is None and get("output.mime_type") == "application/json":
        answer = get("output.value")
        if type(answer) is str and '"usage"' in answer and (found := _ID.match(answer)):
            return found[1]
    return said


def where_of(resource: dict[str, Any], scope: dict[str, Any]) -> Where:
    """{"attributes", and what else there is} of each; what is empty or 0 is left out."""
    made = [orjson.Fragment(_dumps(_shared(item))) for item in (resource, scope)]
    return Where(made[0], made[1], links_of(resource["attributes"]))


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
    head["resource"], head["scope"] = where.resource, where.scope
    data = _dumps(head)
    seed = repr((said.trace_id, said.parent_id, said.name, said.start_ns, nth)).encode()
    span_id = hashlib.sha256(b"\0".join((seed, data, *bodies))).hexdigest()[:16]
    attributes = said.attributes
    links = links_of(attributes, where.links)
    names = (agent_of(attributes, EVENT, ""), text_of(attributes.get, MODELS), tool_name_of(attributes, EVENT, ""))
    times = (said.start_ns, said.start_ns)
    row = (said.trace_id, span_id, said.parent_id, said.name, EVENT, *times, None, links.session, *names, 0, 0, None)
    return Span(*row, data, tuple(bodies), *links[1:])


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


def _dumps(head: dict[str, Any]) -> bytes:
    try:
        return dumped(head)
    except TypeError as error:  # text that is none, or a number of more than 64 bits
        raise ValueError(f"a value that is no JSON: {error}") from None
