"""tau-bench results (`[{task_id, reward, info, traj, trial}]`) and tau2 results (`results.json`, `simulations/*.json`).

Sources: sierra-research/tau-bench, and tau2-bench `src/tau2/data_model/{message,simulation}.py`. A spoken
simulation has ticks instead of messages: what an agent says in ticks that follow each other is one answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentloop.errors import FormatError
from agentloop.formats.chat import add_messages, assistant, content
from agentloop.formats.fields import Fields, read_one, score, unheard
from agentloop.formats.source import SourceFile
from agentloop.formats.steps import Steps, trace_id
from agentloop.protocols import Records
from agentloop.types import Imported, Message, Score, StopReason, Trace

STOPS = {
    "user_stop": StopReason.submitted,
    "agent_stop": StopReason.submitted,
    "max_steps": StopReason.step_limit,
    "timeout": StopReason.time_limit,
    "context_window_exceeded": StopReason.context_limit,
    "too_many_errors": StopReason.error,
    "agent_error": StopReason.error,
    "user_error": StopReason.error,
    "infrastructure_error": StopReason.error,
    "unexpected_error": StopReason.error,
}
USER_STOP = "###STOP###"
"""What a simulated user says when it is done."""
BROKEN = {"user_error", "infrastructure_error", "unexpected_error"}
"""Ends that are nobody's fault who is judged."""


class TauFormat:
    """`traj` with a reward, or `termination_reason` with messages or ticks."""

    name = "tau"

    def recognises(self, source: Records) -> bool:
        """See `Format`."""
        return any(_is_tau(item) for head in source.head for item in (head[:1] if isinstance(head, list) else [head]))

    def read(self, source: Records) -> Iterator[Imported | FormatError]:
        """See `Format`."""
        for where, record in source.records():
            if isinstance(record, dict) and "tasks" in record and "termination_reason" not in record:
                yield from self._results(record, where, source)
            else:
                yield self._read(record, where, {})

    def _results(self, record: dict[str, Any], where: str, source: Records) -> Iterator[Imported | FormatError]:
        """A run's simulations, in its file or in the folder beside it; each keeps what is said of run and task."""
        try:
            results = Fields(record, where)
            tasks = {
                task.get("id"): task for task in results.items("tasks") if isinstance(task, dict) and _hashable(task)
            }
            records = [(f"{where}: simulations[{n}]", item) for n, item in enumerate(results.items("simulations"))]
            if not records:
                for file in sorted((source.path.parent / "simulations").glob("*.json*")):
                    records += SourceFile(file).records()
            if not records:
                raise FormatError(f"{where}: no simulations in it, and none in simulations/ beside it")
        except FormatError as error:
            yield error
            return
        run = {key: value for key, value in record.items() if key not in ("tasks", "simulations")}
        for place, item in records:
            task_id = item.get("task_id") if isinstance(item, dict) else None
            task = tasks.get(task_id) if isinstance(task_id, str | int) else None
            yield self._read(item, place, {**run, **({"task": task} if task else {})})

    def _read(self, record: Any, where: str, run: dict[str, Any]) -> Imported | FormatError:
        if isinstance(record, FormatError):
            return record
        if isinstance(record, dict) and "traj" in record:
            return read_one(where, record, self._trace)
        return read_one(where, record, lambda fields, record: self._simulation(fields, record, run))

    def _trace(self, fields: Fields, record: Any) -> Imported:
        steps = Steps()
        add_messages(steps, fields, "traj")
        info = fields.peek("info")
        error = info.get("error") if isinstance(info, dict) else None
        stopped = steps.unheard and USER_STOP in steps.unheard[-1].content
        stop = StopReason.submitted if stopped else StopReason.unknown
        if error:
            stop = StopReason.error
        message = error if isinstance(error, str) else None
        return self._imported(
            fields, record, steps, score(fields, "reward", "tau:reward"), stop_reason=stop, error=message
        )

    def _simulation(self, fields: Fields, record: Any, run: dict[str, Any]) -> Imported:
        if "messages" not in fields and "ticks" not in fields:
            raise FormatError(f"{fields.where}: neither traj nor messages nor ticks")
        steps = Steps()
        info = Fields(run.get("info") or {}, f"{fields.where}: info")
        agent = info.fields("agent_info")
        environment = info.fields("environment_info")
        model = agent.text("llm") if agent else None
        policy = environment.text("policy") if environment else None
        messages = list(fields.objects("messages"))
        if policy and not any(message.peek("role") == "system" for message in messages):
            steps.hear(Message(role="system", content=policy))
        for message in messages:
            _add(steps, message, model)
        _add_ticks(steps, fields, model)
        reason = fields.peek("termination_reason")
        scores = []
        if reward := fields.fields("reward_info"):
            scores = score(reward, "reward", "tau:reward")
            if parts := reward.fields("reward_breakdown"):
                scores += [rating for key in list(parts.left()) for rating in score(parts, key, f"tau:{key}")]
        imported = self._imported(
            fields,
            record,
            steps,
            scores,
            source_id=fields.text("id"),
            stop_reason=STOPS.get(reason, StopReason.unknown) if isinstance(reason, str) else StopReason.unknown,
            error=reason if isinstance(reason, str) and reason in BROKEN else None,
            started_at=fields.time("start_time"),
            duration_s=fields.number("duration") or 0.0,
        )
        left = {f"info.{path}": value for path, value in info.left().items()}
        left |= {key: value for key, value in run.items() if key != "info"}
        return imported.model_copy(update={"raw": {**imported.raw, **fields.left(), **left}})

    def _imported(self, fields: Fields, record: Any, steps: Steps, scores: list[Score], **more: Any) -> Imported:
        task = fields.take("task_id")
        if task is not None and not isinstance(task, str | int):
            raise FormatError(f"{fields.where}: task_id: neither text nor a number")
        trace = Trace(
            id=trace_id(self.name, record),
            source=self.name,
            task_id=None if task is None else str(task),
            messages=steps.first,
            steps=steps.done(),
            **more,
        )
        return Imported(trace=trace, scores=tuple(scores), raw={**fields.left(), **unheard(steps.unheard)})


def _add(steps: Steps, message: Fields, model: str | None) -> None:
    """One message; what the simulated user's own tools were asked and gave is something the agent did not see."""
    role = message.text("role")
    if role == "tool":
        for result in list(message.objects("tool_messages")) or [message]:
            _add_result(steps, result)
    elif role == "assistant":
        if message.peek("context_truncation"):
            steps.compact()
        steps.answer(assistant(message), started_at=message.time("timestamp"), **_usage(message, model))
    elif role in ("system", "user"):
        calls = assistant(message).tool_calls if message.peek("tool_calls") else ()
        steps.hear(Message(role=role, content=content(message), tool_calls=calls))
    else:
        raise FormatError(f"{message.where}: role: {role!r} is none of assistant, system, tool, user")


def _add_result(steps: Steps, result: Fields) -> None:
    call_id = result.text("id")
    text = content(result)
    result.take("role")
    if result.peek("requestor") == "user":
        steps.hear(Message(role="tool", content=text, tool_call_id=call_id, name="user"))
    else:
        steps.result(call_id, text, ok=not result.truth("error"))


def _usage(message: Fields, model: str | None) -> dict[str, Any]:
    usage = message.fields("usage")
    raw = message.peek("raw_data")
    own_model = raw.get("model") if isinstance(raw, dict) else None
    return {
        "model": own_model if isinstance(own_model, str) else model,
        "n_prompt_tokens": (usage and usage.integer("prompt_tokens")) or 0,
        "n_completion_tokens": (usage and usage.integer("completion_tokens")) or 0,
        "cost_usd": message.number("cost"),
    }


def _add_ticks(steps: Steps, fields: Fields, model: str | None) -> None:
    """Ticks in which the same one speaks are one message; an agent's call begins the answer's end."""
    ticks = list(fields.objects("ticks"))
    speech: dict[str, list[str]] = {"agent": [], "user": []}
    began: dict[str, Any] = {}

    def finish(who: str, calls: Fields | None = None) -> None:
        if who == "agent" and (calls or who in began):
            spoken = assistant(calls) if calls else Message(role="assistant")
            text = "".join(speech[who])
            steps.answer(spoken.model_copy(update={"content": text}), started_at=began.get(who), model=model)
        elif who in began:
            steps.hear(Message(role="user", content="".join(speech[who])))
        began.pop(who, None)
        speech[who] = []

    for n, tick in enumerate(ticks):
        if tick.peek("tick_id") == n:
            tick.take("tick_id")
        timestamp = tick.peek("timestamp")
        at = tick.time("timestamp")
        tick.keep("timestamp", timestamp)
        for who in ("user", "agent"):
            chunk = tick.fields(f"{who}_chunk")
            if chunk is not None:
                chunk.take("role")
            spoken = chunk is not None and (chunk.truth("contains_speech") or bool(chunk.peek("content")))
            if chunk is not None and spoken:
                began.setdefault(who, at)
                speech[who].append(content(chunk))
            elif who in began:
                finish(who)
        if tick.peek("agent_tool_calls"):
            finish("agent", Fields({"tool_calls": tick.take("agent_tool_calls")}, tick.where))
        for result in tick.objects("agent_tool_results"):
            _add_result(steps, result)
    finish("user")
    finish("agent")


def _hashable(task: dict[str, Any]) -> bool:
    return isinstance(task.get("id"), str | int)


def _is_tau(item: Any) -> bool:
    if not isinstance(item, dict) or "records" in item:  # other people's data made from tau-bench runs
        return False
    results = {"info", "tasks"} <= item.keys() and isinstance(item["info"], dict) and "environment_info" in item["info"]
    simulation = {"id", "task_id", "termination_reason"} <= item.keys() and bool({"messages", "ticks"} & item.keys())
    return results or simulation or {"task_id", "reward", "traj"} <= item.keys()
