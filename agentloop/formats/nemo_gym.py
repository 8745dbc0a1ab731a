"""NeMo Gym rollouts: `{"responses_create_params", "response", "reward", ...}` a line, with what the verifier found.

Source: the rollouts that NVIDIA-NeMo/Gym has beside its environments. Request and response are those of the
Responses API; the other keys are the environment's own, and what has no place in a Trace is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentloop.errors import FormatError
from agentloop.formats.fields import Fields, read_each, scores
from agentloop.formats.responses import add_input, add_items, ending
from agentloop.formats.steps import Steps, trace_id
from agentloop.protocols import Records
from agentloop.types import Imported, StopReason, Trace

TASKS = ("task_id", "instance_id", "id", "task_idx", "_ng_task_index")
"""Where the task's name may be, the best first."""
SCORES = (
    "reward", "resolved", "score", "accuracy", "exact_accuracy", "correctness", "partial", "strict", "loose",
    "library_reward", "similarity_score", "set_overlap", "symbolic_equivalent", "rubric_fraction",
    "rubric_weighted_fraction", "f2p", "p2p", "schema_valid", "format", "hit",
)  # fmt: skip
STOPS = {
    "agent_timed_out": StopReason.time_limit,
    "agent_timeout_error": StopReason.time_limit,
    "context_length_exceeded_error": StopReason.context_limit,
    "memory_limit_exceeded_error": StopReason.error,
}
"""Flags, or how often it happened."""


class NemoGymFormat:
    """`responses_create_params`, which nothing else has, with the response to them."""

    name = "nemo_gym"

    def recognises(self, source: Records) -> bool:
        """See `Format`."""
        head = source.head
        return (
            bool(head)
            and all(isinstance(record, dict) and "responses_create_params" in record for record in head)
            and any("response" in record for record in head)
        )

    def read(self, source: Records) -> Iterator[Imported | FormatError]:
        """See `Format`."""
        yield from read_each(source, self._imported)

    def _imported(self, fields: Fields, record: Any) -> Imported:
        request = fields.fields("responses_create_params")
        response = fields.fields("response")
        if request is None or response is None:
            raise FormatError(f"{fields.where}: {'response' if request else 'responses_create_params'}: is missing")
        steps = Steps()
        add_input(steps, request, response)
        if response.peek("contains_transitions") is True:
            response.keep("output", _joined(response.items("output"), f"{response.where}: output"))
        add_items(steps, response, "output", response.text("model") or None)
        values, own_steps = ending(response, steps)
        for key, value in record["responses_create_params"].items():
            if key in response and response.peek(key) == value:  # it repeats what was asked
                response.take(key)
        agent = fields.fields("agent_ref")
        components = fields.fields("reward_components")
        ratings = scores(fields, self.name, SCORES)
        names = list(record["reward_components"]) if components else []
        ratings += tuple(
            score.model_copy(update={"verifier": f"{self.name}:reward_components.{score.verifier.partition(':')[2]}"})
            for score in scores(components, self.name, names)
        )
        stops = [stop for flag, stop in STOPS.items() if isinstance(n := fields.peek(flag), int) and n > 0]
        if (ran := fields.number("agent_run_time")) is not None:
            values["duration_s"] = ran
        _drop_delegated(fields, record)
        return Imported(
            trace=Trace(
                id=trace_id(self.name, record),
                source=self.name,
                task_id=_task(fields),
                agent=agent.text("name") if agent else None,
                messages=steps.first,
                steps=own_steps,
                **(values | ({"stop_reason": stops[0]} if stops else {})),
            ),
            scores=ratings,
            raw=fields.left(),
        )


def _task(fields: Fields) -> str | None:
    for key in TASKS:
        if isinstance(value := fields.peek(key), str | int) and not isinstance(value, bool):
            fields.take(key)
            return str(value)
    return None


def _joined(transitions: list[Any], where: str) -> list[Any]:
    """Items of a run whose output lists them for each turn anew: each transition begins with those before it."""
    items: list[Any] = []
    for n, transition in enumerate(transitions):
        if not isinstance(transition, list):
            raise FormatError(f"{where}[{n}]: got {type(transition).__name__}, expected a list of items")
        if transition[: len(items)] == items:
            items += transition[len(items) :]
        else:  # the context was changed
            items += [{"type": "compaction"}, *(item for item in transition if item not in items)]
    return items


def _drop_delegated(fields: Fields, record: dict[str, Any]) -> None:
    """Another verifier's answer, which repeats the whole rollout."""
    delegated = fields.fields("delegated_response")
    for key in ("responses_create_params", "response") if delegated else ():
        if delegated and delegated.peek(key) == record[key]:
            delegated.take(key)
