"""A call of a model as a span: what was asked, what was answered or went wrong, and the exact tokens."""

from __future__ import annotations

import secrets
import time
from array import array
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from agentloop.gateway.contexts import Place, Run, trace_id_of
from agentloop.gateway.dialects.completion import number, table_of, text_of
from agentloop.gateway.failures import MAX_WORDS
from agentloop.gateway.routes import Target
from agentloop.otel.attributes import EPISODE, TASK, VERSION
from agentloop.otel.genai import ERROR, Said, span_of, where_of
from agentloop.store.keys import Key, Spent
from agentloop.types import Span

WHERE = where_of({"attributes": {"service.name": "agentloop"}}, {"name": "agentloop.gateway", "attributes": {}})
MAX_NAME = 200
"""Characters of a name that nobody has."""
INTERNAL, CLIENT = 1, 3
"""Kinds of OpenTelemetry spans."""
SETTINGS = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
}
"""Keys of a request that decide what is sampled."""


@dataclass
class Call:
    """One call, from its request to its end."""

    project: str
    key: str | None
    """Id of the key that it came by."""
    episode: str | None
    dialect: str
    asked: dict[str, Any]
    """As a request for a chat completion."""
    target: Target
    place: Place
    started_ns: int
    first_ns: int | None = None
    """When the first piece of a streamed answer came."""
    ended_ns: int = 0
    answer: dict[str, Any] | None = None
    """As a chat completion; of one that broke off, what there was."""
    error: tuple[str, str] | None = None
    """(kind, words) of what went wrong."""
    is_recorded: bool = False
    """Whether it is on disk: it is counted once."""
    is_exact: bool = False
    """Whether the upstream was asked for exact tokens."""
    extends: bool | None = None
    """Whether its tokens begin with those of the call before it in the conversation; None where nobody can tell."""
    cost_usd: float | None = None
    span_id: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def message(self) -> dict[str, Any]:
        """What the policy said; empty where it said nothing."""
        return table_of(self._choice, "message")

    @property
    def tokens(self) -> tuple[list[int], list[int], list[float]]:
        """(ids of the prompt, ids of the answer, log-probability of each of these); empty where they are not known."""
        said = table_of(self._choice, "logprobs").get("content")
        ids = _ids((self.answer or {}).get("prompt_token_ids")), _ids(self._choice.get("token_ids"))
        if isinstance(said, array):
            return *ids, said.tolist()
        found = [each.get("logprob") for each in said if isinstance(each, dict)] if isinstance(said, list) else []
        return *ids, [each for each in found if isinstance(each, float | int)]

    @property
    def usage(self) -> tuple[int, int]:
        """(tokens of the prompt, tokens of the answer), as the upstream counted them, else as many ids as there are."""
        found = (self.answer or {}).get("usage")
        n_prompt, n_completion = number(found, "prompt_tokens"), number(found, "completion_tokens")
        if n_prompt and n_completion:
            return n_prompt, n_completion
        prompt, sampled, _ = self.tokens
        return n_prompt or len(prompt), n_completion or len(sampled)

    @property
    def charged(self) -> tuple[int, int]:
        """The same, and where an answer broke off before anybody counted, one token for four letters of JSON."""
        if self.answer is None or any(self.usage):
            return self.usage
        return _estimated(self.asked.get("messages")), _estimated(self.message)

    @property
    def spent(self) -> Spent:
        """What it counts for."""
        return Spent(1, sum(self.charged), self.cost_usd or 0.0)

    @property
    def _choice(self) -> dict[str, Any]:
        return next(iter(self.choices), {})

    @property
    def choices(self) -> list[dict[str, Any]]:
        """Of the answer, by their index: the first is the policy's word. An upstream may send anything."""
        listed = (self.answer or {}).get("choices")
        choices = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        return sorted(choices, key=lambda each: number(each, "index"))

    @property
    def alternatives(self) -> list[dict[str, Any]]:
        """The messages of the other choices: a client may go on from any."""
        return [table_of(choice, "message") for choice in self.choices[1:]]


class RefusedCall(NamedTuple):
    """One that got no further than the gateway."""

    project: str
    key: Key | None
    episode: str | None
    dialect: str
    model: Any
    """Whatever it named as one."""
    status: int
    why: str
    started_ns: int


def spans_of_call(call: Call) -> list[Span]:
    """The call's span, and before a sub-agent's first one those of the agents."""
    run = call.place.run
    run.started_ns = run.started_ns or call.started_ns
    made = [_agent(call, each) for each in (run.parent, run) if run.parent and each and not each.is_told]
    model = text_of(call.answer or {}, "model") or call.target.model
    within = run.span_id if run.parent else None
    times = (call.started_ns, call.ended_ns)
    made.append(_span(call, call.span_id, within, f"chat {model}", times, _attributes(call, model), CLIENT))
    return made


def span_of_refused(call: RefusedCall) -> Span:
    """A call that the gateway answered with an error itself: that it was made, and why not; not what was said in it."""
    given = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": call.model[:MAX_NAME] if isinstance(call.model, str) else None,
        EPISODE: call.episode,
        "agentloop.dialect": call.dialect,
        "agentloop.key": call.key and call.key.id,
        "error.type": f"refused_{call.status}",
    }
    given = {key: value for key, value in given.items() if value is not None}
    trace_id = trace_id_of(call.project, call.episode) if call.episode else secrets.token_hex(16)
    words = f"call refused ({call.status}): {call.why[:MAX_WORDS]}"
    times = (call.started_ns, time.time_ns())
    said = Said(trace_id, secrets.token_hex(8), None, "chat", *times, given, [], [], ERROR, words, {"kind": CLIENT})
    return span_of(said, WHERE)


def _agent(call: Call, run: Run) -> Span:
    name = "sub-agent" if run.parent else "agent"
    given = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name, EPISODE: call.episode, TASK: run.task}
    above = run.parent.span_id if run.parent else None
    return _span(call, run.span_id, above, f"invoke_agent {name}", (run.started_ns, run.started_ns), given, INTERNAL)


def _attributes(call: Call, model: str) -> dict[str, Any]:
    prompt, sampled, logprobs = call.tokens
    n_prompt, n_completion = call.usage
    answer, asked = call.answer or {}, call.asked
    details = table_of(table_of(answer, "usage"), "prompt_tokens_details")
    outputs = [
        {**table_of(choice, "message"), "finish_reason": text_of(choice, "finish_reason") or None}
        for choice in call.choices
    ]
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": call.target.upstream.name,
        "gen_ai.request.model": asked.get("model"),
        "gen_ai.response.model": model,
        "gen_ai.response.id": text_of(answer, "id") or None,
        "gen_ai.response.finish_reasons": [o["finish_reason"] for o in outputs if o["finish_reason"]] or None,
        "gen_ai.usage.input_tokens": n_prompt,
        "gen_ai.usage.output_tokens": n_completion,
        "gen_ai.usage.cache_read.input_tokens": details.get("cached_tokens"),
        "gen_ai.input.messages": asked.get("messages"),
        "gen_ai.output.messages": outputs or None,
        "gen_ai.tool.definitions": asked.get("tools"),
        **{name: asked[key] for key, name in SETTINGS.items() if asked.get(key) is not None},
        EPISODE: call.episode,
        TASK: call.place.run.task,
        VERSION: call.target.version,
        "agentloop.dialect": call.dialect,
        "agentloop.key": call.key,
        "agentloop.cost_usd": call.cost_usd,
        "agentloop.token_ids.prompt": prompt or None,
        "agentloop.token_ids.completion": sampled or None,
        "agentloop.logprobs": logprobs if len(logprobs) == len(sampled) and sampled else None,
        "agentloop.tokens": None if call.extends is None else "extend" if call.extends else "fork",
        "agentloop.first_piece_ns": call.first_ns and call.first_ns - call.started_ns,
        "error.type": call.error and call.error[0],
    }


def _ids(given: Any) -> list[int]:
    if isinstance(given, array):
        return given.tolist()
    return given if isinstance(given, list) and {*map(type, given)} <= {int} else []


def _span(
    call: Call,
    span_id: str,
    parent_id: str | None,
    name: str,
    times: tuple[int, int],
    attributes: dict[str, Any],
    kind: int,
) -> Span:
    given = {key: value for key, value in attributes.items() if value is not None}
    code, words = (ERROR, call.error[1]) if call.error and kind == CLIENT else (0, "")
    trace_id = call.place.run.trace_id
    return span_of(Said(trace_id, span_id, parent_id, name, *times, given, [], [], code, words, {"kind": kind}), WHERE)


def _estimated(said: Any) -> int:
    return len(orjson.dumps(said, default=str)) // 4 if said else 0
