"""A trace of verifiers since 0.2: a graph of messages, each with the tokens that it added to those before it."""

from __future__ import annotations

from typing import Any

from agentloop.formats.fields import Fields, keep_unheard, scores
from agentloop.formats.steps import Steps, trace_id
from agentloop.formats.verifiers_graph import Graph
from agentloop.types import Imported, Score, StopReason, SubTrace, Trace

NAME = "verifiers"
STOPS = {
    "max_turns": StopReason.step_limit,
    "max_turns_reached": StopReason.step_limit,
    "prompt_too_long": StopReason.context_limit,
    "max_input_tokens": StopReason.context_limit,
    "max_total_tokens": StopReason.cost_limit,
    "max_output_tokens": StopReason.cost_limit,
    "max_total_completion_tokens_reached": StopReason.cost_limit,
    "no_tools_called": StopReason.no_tool_call,
    "has_final_env_response": StopReason.submitted,
    "agent_completed": StopReason.no_tool_call,
    "has_error": StopReason.error,
    "error": StopReason.error,
    "timeout_reached": StopReason.time_limit,
}


def stop_of(condition: object) -> StopReason:
    """The word stays in what is left: an environment may have its own."""
    word = condition if isinstance(condition, str) else ""
    if word.endswith(("_timeout", "_error")):
        return StopReason.time_limit if word.endswith("_timeout") else StopReason.error
    return STOPS.get(word, StopReason.unknown)


def read_trace(fields: Fields, record: dict[str, Any], episode: dict[str, Any] | None = None) -> Imported:
    """One agent's trace: the path to the newest message is the trace, every other path a child of it."""
    whole = Fields(episode or {}, fields.where)
    graph = Graph(list(fields.objects("nodes")), _calls(fields))
    last = graph.steps(graph.leaves[-1]) if graph.leaves else Steps()
    children = [graph.steps(leaf) for leaf in graph.leaves[:-1]]
    agent = fields.fields("agent")
    task = fields.fields("task")
    timing = fields.fields("timing") or Fields({}, fields.where)
    ran = timing.fields("agent")
    start, end = (ran.number("start"), ran.number("end")) if ran else (None, None)
    if last.done():
        keep_unheard(fields, last.unheard)
    values: dict[str, Any] = {
        "source": NAME,
        "session": whole.text("id"),
        "agent": agent.text("name") if agent else None,
    }
    new_id = trace_id(NAME, [record, episode])
    return Imported(
        trace=Trace(
            id=new_id,
            source_id=fields.text("id"),
            task_id=_task(task),
            policy_version=_policy(whole),
            messages=last.first,
            steps=last.done(),
            children=tuple(
                SubTrace(
                    trace=Trace(
                        id=trace_id(NAME, [new_id, n]),
                        messages=steps.first,
                        steps=steps.done(),
                        stop_reason=StopReason.unknown,
                        **values,
                    )
                )
                for n, steps in enumerate(children)
            ),
            stop_reason=StopReason.time_limit
            if fields.peek("is_timeout") is True
            else stop_of(fields.peek("stop_condition")),
            error=_error(fields),
            started_at=timing.time("start"),
            duration_s=max(0.0, end - start) if start and end else 0.0,
            **values,
        ),
        scores=_rewards(fields, record),
        raw=fields.left() | {f"episode.{path}": value for path, value in whole.left().items()},
    )


def _calls(fields: Fields) -> dict[int, dict[str, Any]]:
    """Node -> what the call that made it says of the answer. A call that made none stays in what is left."""
    calls: dict[int, dict[str, Any]] = {}
    for call in fields.objects("calls"):
        node = call.peek("node")
        if not isinstance(node, int) or node in calls:
            continue
        call.take("node")
        usage = call.fields("usage") or Fields({}, call.where)
        cached = usage.integer("cached_input_tokens") or 0
        calls[node] = {
            "model": call.text("model"),
            "finish_reason": call.text("finish_reason"),
            "n_prompt_tokens": (usage.integer("prompt_tokens") or 0) + cached,  # which leaves out those of the cache
            "n_cached_tokens": cached,
            "n_completion_tokens": usage.integer("completion_tokens") or 0,
            "cost_usd": usage.number("cost"),
        }
    return calls


def _task(task: Fields | None) -> str | None:
    """The best name that the task has."""
    data = task.fields("data") if task else None
    for fields, key in ((data, "id"), (data, "name"), (data, "idx"), (task, "key"), (task, "hash")):
        value = fields.peek(key) if fields else None
        if fields and isinstance(value, str | int) and not isinstance(value, bool):
            fields.take(key)
            return str(value)
    return None


def _policy(episode: Fields) -> int | None:
    """The version that answered, when it was one and the same."""
    run = episode.fields("run")
    work = run.fields("work") if run else None
    policy = work.fields("policy") if work else None
    if policy is None:
        return None
    start = policy.integer("start")
    end = policy.integer("end")
    if start == end:
        return start
    policy.keep("start", start)
    policy.keep("end", end)
    return None


def _error(fields: Fields) -> str | None:
    """The last one of a run that did not go well: those before it were tried again."""
    errors = fields.peek("errors")
    last = errors[-1] if isinstance(errors, list) and errors and fields.peek("ok") is not True else None
    return f"{last.get('type')}: {last.get('message')}" if isinstance(last, dict) else None


def _rewards(fields: Fields, record: dict[str, Any]) -> tuple[Score, ...]:
    ratings: list[Score] = []
    rewards = fields.fields("rewards")
    for name in record["rewards"] if rewards else ():
        if rewards and isinstance(rewards.peek(name), dict):
            reward = rewards.fields(name)
            ratings += [s.model_copy(update={"verifier": f"{NAME}:{name}"}) for s in scores(reward, NAME, ["score"])]
    metrics = fields.fields("metrics")
    return (*ratings, *scores(metrics, NAME, record["metrics"] if metrics else ()))
