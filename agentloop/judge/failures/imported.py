"""Others' traces as detectors read them: what their source said beside the trace is looked up here.

Expected actions, the reward, the tools that were offered and the word with which a run ended are kept raw by
the importers (`Imported.raw`), each format in its own place. What is not there is not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentloop.judge.failures.critical import label
from agentloop.judge.failures.reading import Reading
from agentloop.judge.failures.rules import RULES, Rule
from agentloop.judge.failures.vocabularies import leaf_of
from agentloop.types import Failure, FailureType, Imported, RewardState, Score, Task

REWARDS = ("reward", "resolved", "is_correct")
"""What the score that decides is called, after the source's name; the first that is there counts."""
STATUSES = (
    "info.exit_status", "exit_status", "termination_reason", "agent_error_kind", "extra.agent_error_kind",
    "error_kind", "failure_mode", "output.status", "status",
)  # fmt: skip
GRADER_FLAGS = ("eval_timed_out", "extra.eval_timed_out")
TOOLS = ("responses_create_params.tools", "tools")
MAX_INSTRUCTION = 10_000


def classify_imported(
    imported: Imported, *, rules: Sequence[Rule] = RULES, guess: Rule | None = None
) -> tuple[Failure, ...]:
    """Every failure of a trace from elsewhere, as `critical.classify` gives them for one of ours."""
    reading = read_imported(imported)
    state = RewardState.unscored if reading.reward is None else RewardState.scored
    return label(reading, state, rules=rules, guess=guess)


def read_imported(imported: Imported, task: Task | None = None) -> Reading:
    """What detectors are given. task: in place of the one that can be made of the trace."""
    trace, task = imported.trace, task or task_of(imported)
    return Reading(
        task,
        trace,
        reward_of(imported.scores),
        imported.scores,
        ended=_ended(trace.source, imported.raw),
        offered=_offered(imported.raw),
        expected=_expected(imported.raw),
    )


def task_of(imported: Imported) -> Task:
    """The task, as far as its trace tells it: the first words of a user."""
    trace = imported.trace
    asked = next((m.content for m in trace.messages if m.role == "user" and m.content), "")
    return Task(id=trace.task_id or trace.id, instruction=asked[:MAX_INSTRUCTION])


def reward_of(scores: Sequence[Score]) -> float | None:
    """The number that decides whether a run succeeded; None where its source gave none."""
    named = {score.verifier.partition(":")[2]: score.value for score in scores}
    return next((value for name in REWARDS if (value := named.get(name)) is not None), None)


def _ended(source: str, raw: Mapping[str, Any]) -> FailureType | None:
    words = (raw.get(key) for key in STATUSES)
    found = (leaf_of(source, word) for word in words if isinstance(word, str))
    leaf = next((leaf for leaf in found if leaf is not None and leaf is not FailureType.unclassified), None)
    if leaf is None and any(raw.get(flag) is True for flag in GRADER_FLAGS):
        return FailureType.infra_grader_failure
    return leaf


def _offered(raw: Mapping[str, Any]) -> frozenset[str] | None:
    tools = next((tools for key in TOOLS if isinstance(tools := raw.get(key), list) and tools), [])
    names: set[str] = set()
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):  # one that its provider brings: who knows what it is called in a trace
            return None
        names.add(name)
    return frozenset(names) or None


def _expected(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...] | None:
    """tau-bench has `info.task.actions`, `{name, kwargs}`; tau2 `task.evaluation_criteria.actions`."""
    info, task = raw.get("info"), raw.get("task")
    told = info.get("task") if isinstance(info, dict) else None
    actions = told.get("actions") if isinstance(told, dict) else None
    if actions is None and isinstance(task, dict):
        criteria = task.get("evaluation_criteria")
        actions = criteria.get("actions") if isinstance(criteria, dict) else None
    if not isinstance(actions, list):
        return None
    made = []
    for action in actions:
        if not isinstance(action, dict) or not isinstance(action.get("name"), str):
            return None
        if action.get("requestor") != "user":
            made.append({"name": action["name"], "arguments": action.get("kwargs", action.get("arguments"))})
    return tuple(made)
