"""Langfuse trace exports, `{"trace": {...}, "observations": [...]}`.

Source: langfuse/langfuse, API reference and `worker/src/__tests__/chatml`. A GENERATION is a step, a TOOL (or a SPAN
called as a pending call) its result, an AGENT that has generations beside others a child. A GENERATION around others is
the same model call told by another library, or the whole run: the innermost that says something is the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentloop.errors import FormatError
from agentloop.formats.fields import Fields, score
from agentloop.formats.runs import RecordedRun, build
from agentloop.formats.steps import trace_id
from agentloop.protocols import Records
from agentloop.types import Imported, Score

TOOLS = {"TOOL", "RETRIEVER"}
TREE = ("type", "name", "parentObservationId", "startTime", "endTime")
"""Kept of every observation: a trace's steps do not tell how they were nested."""
USAGE = (("input", "promptTokens", "input_tokens"), ("output", "completionTokens", "output_tokens"))
CACHED = ("input_cache_read", "prompt_details.cache_read", "input_cached_tokens", "cache_read_input_tokens")


class LangfuseFormat:
    """A `trace` with an `id`, beside a list of `observations`."""

    name = "langfuse"

    def recognises(self, source: Records) -> bool:
        """See `Format`."""
        return any(
            isinstance(record, dict)
            and isinstance(record.get("observations"), list)
            and isinstance(record.get("trace"), dict)
            for record in source.head
        )

    def read(self, source: Records) -> Iterator[Imported | FormatError]:
        """See `Format`."""
        for where, record in source.records():
            try:
                if isinstance(record, FormatError):
                    raise record
                fields = Fields(record, where)
                head = fields.fields("trace")
                if head is None:
                    raise FormatError(f"{where}: trace: missing")
                runs: list[RecordedRun] = []
                for observation in fields.objects("observations"):
                    try:
                        runs.append(_run(observation))
                    except FormatError as error:
                        yield error
                yield self._trace(record, fields, head, runs)
            except FormatError as error:
                yield error

    def _trace(self, record: Any, fields: Fields, head: Fields, runs: list[RecordedRun]) -> Imported:
        scores: list[Score] = []
        head.take("observations")  # ids of what stands beside
        for rating in head.objects("scores") if isinstance(head.peek("scores"), list) else ():
            scores += score(rating, "value", f"{self.name}:{rating.peek('name')}")
        trace, raw = build(self.name, trace_id(self.name, record), runs)
        more = {
            "source_id": head.text("id"),
            "session": head.text("sessionId"),
            "started_at": head.time("timestamp") or trace.started_at,
        }
        return Imported(trace=trace.model_copy(update=more), scores=tuple(scores), raw={**fields.left(), **raw})


def _run(observation: Fields) -> RecordedRun:
    tree = {key: observation.peek(key) for key in TREE}
    kind = observation.text("type") or ""
    attributes = _attributes(observation.peek("metadata"))
    agent = attributes.get("gen_ai.agent.name") or attributes.get("agent_name")
    run = RecordedRun(
        fields=observation,
        id=observation.text("id") or "",
        parent=observation.text("parentObservationId"),
        kind=_kind(kind),
        name=observation.text("name") or "",
        inputs="input",
        outputs="output",
        started_at=observation.time("startTime"),
        ended_at=observation.time("endTime"),
    )
    for key, value in tree.items():
        observation.keep(key, value)
    is_agent = kind == "AGENT" or (kind == "SPAN" and isinstance(agent, str))
    if is_agent:
        run.agent = agent if isinstance(agent, str) else run.name
    keys = ("gen_ai.tool.call.id", "ai.toolCall.id", "tool_call.id")
    call_id = next((attributes[key] for key in keys if key in attributes), None)
    run.call_id = call_id if isinstance(call_id, str) else None
    if observation.peek("level") == "ERROR":
        run.error = observation.text("statusMessage") or "error"
    if run.kind == "llm":
        run.usage = _usage(observation)
    return run


def _kind(observation_type: str) -> str:
    if observation_type == "GENERATION":
        return "llm"
    return "tool" if observation_type in TOOLS else "span"


def _usage(observation: Fields) -> dict[str, Any]:
    details = observation.peek("usageDetails") or observation.peek("usage")
    details = details if isinstance(details, dict) else {}

    def count(*keys: str) -> int:
        return next((v for key in keys if isinstance(v := details.get(key), int) and not isinstance(v, bool)), 0)

    return {
        "model": observation.text("model"),
        "n_prompt_tokens": count(*USAGE[0]),
        "n_completion_tokens": count(*USAGE[1]),
        "n_cached_tokens": count(*CACHED),
        "cost_usd": observation.number("totalCost") or None,
    }


def _attributes(metadata: Any) -> dict[str, Any]:
    from agentloop.formats.loose import unwrapped

    value = unwrapped(metadata)
    attributes = unwrapped(value.get("attributes")) if isinstance(value, dict) else None
    return attributes if isinstance(attributes, dict) else {}
