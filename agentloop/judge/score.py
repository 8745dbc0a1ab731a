"""Trace -> Verdict: run the task's verifiers, combine their numbers, say what went wrong.

The state is what keeps training honest. Only `scored` carries a reward; what broke and what could
not be graded has none, rather than a 0. Nothing here runs the agent or writes to a store.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from traceback import walk_tb
from typing import Any

from agentloop.errors import PluginError
from agentloop.judge.failures.critical import classify
from agentloop.plugins import load_part
from agentloop.protocols import Verifier
from agentloop.types import Part, RewardState, Score, StopReason, Task, Trace, Verdict

TIMEOUT_S = 60.0
"""Wall time of one verifier. It ends what awaits; code that blocks the loop is its author's own to bound."""
MAX_LOADED = 4096
"""Verifiers kept between traces; a suite repeats its tasks, and building one costs more than running it."""
MAX_WORDS = 500
"""Characters kept of what a verifier raised: it may quote a whole answer."""
ENGINE = Path(__file__).parents[1]
_loaded: dict[str, Verifier] = {}


async def judge(
    task: Task,
    trace: Trace,
    verifiers: Sequence[Verifier] | None = None,
    *,
    load: Callable[[Part], Verifier] | None = None,
) -> Verdict:
    """The worth of a finished trace, and why.

    verifiers: in place of the task's own, which `load` makes from its parts (installed ones by
    default, kept between calls). The reward is the mean of their values.

    - `infra_failed`: the trace broke, or a reference command timed out and nothing went wrong
      before it. Verifiers are not run. Any other timeout is the agent's own and is scored, so that
      no policy escapes a reward with `sleep 999`.
    - `unscored`: there is no verifier, or one raised, took more than TIMEOUT_S or gave no number in
      [0, 1]. One bad verifier is enough: a mean of the others would be another reward. Its score says why.

    Raises PluginError when a verifier cannot be made: a task's mistake, not a trace's.
    """
    if _broke(task, trace):
        return _verdict(task, trace, RewardState.infra_failed)
    if verifiers is None:
        verifiers = [(load or _installed)(part) for part in task.verifiers]
    if not verifiers:
        reason = Score(verifier="none", version="0", value=None, error=f"task {task.id} names no verifier")
        failures = classify(task, trace, RewardState.unscored)
        return Verdict(trace_id=trace.id, state=RewardState.unscored, reward=None, scores=(reason,), failures=failures)
    scores = tuple([await _score(verifier, trace) for verifier in verifiers])
    values = [score.value for score in scores if score.value is not None]
    if len(values) < len(scores):
        return _verdict(task, trace, RewardState.unscored, scores=scores)
    return _verdict(task, trace, RewardState.scored, math.fsum(values) / len(values), scores)


def _broke(task: Task, trace: Trace) -> bool:
    """True when what ended or decided the trace was not the agent's doing."""
    if trace.error is not None or trace.stop_reason is StopReason.error:
        return True
    if not any(result.timed_out for step in trace.steps for result in step.results):
        return False
    failures = classify(task, trace, RewardState.infra_failed)
    return any(failure.critical and failure.type.is_infra for failure in failures)


async def _score(verifier: Verifier, trace: Trace) -> Score:
    """One verifier's score; a value that cannot be used is reported as it was, never clipped."""
    limit = asyncio.timeout(TIMEOUT_S)
    try:
        async with limit:
            value = await verifier.score(trace, None)
    except Exception as error:  # a plugin may raise anything, and none of it may become a reward
        return _no_score(verifier, _late() if limit.expired() else _raised(error))
    if limit.expired():  # it caught its own cancellation
        return _no_score(verifier, _late())
    if not isinstance(value, Real) or not 0.0 <= value <= 1.0:
        return _no_score(verifier, f"gave {value!r:.100}, not a number in [0, 1]")
    return Score(verifier=verifier.name, version=verifier.version, value=float(value))


def _raised(error: Exception) -> str:
    """`KeyError: 'x' (verifier.py:12)`: on one line, with the last place in the verifier's file when it is not ours."""
    words = " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())[:MAX_WORDS]
    said = f"{type(error).__name__}: {words}" if words else type(error).__name__
    _, *inside = [(Path(frame.f_code.co_filename), line) for frame, line in walk_tb(error.__traceback__)]
    if not inside or inside[0][0].is_relative_to(ENGINE):
        return said
    file = inside[0][0]
    return f"{said} ({file.name}:{[line for path, line in inside if path == file][-1]})"


def _late() -> str:
    return f"timed out after {TIMEOUT_S:g} s"


def _no_score(verifier: Verifier, why: str) -> Score:
    return Score(verifier=verifier.name, version=verifier.version, value=None, error=why)


def _verdict(
    task: Task, trace: Trace, state: RewardState, reward: float | None = None, scores: tuple[Score, ...] = ()
) -> Verdict:
    failures = classify(task, trace, state, reward, scores)
    return Verdict(trace_id=trace.id, state=state, reward=reward, scores=scores, failures=failures)


def _installed(part: Part) -> Verifier:
    """The installed verifier that `part` names, made once; it is shared and must not keep state."""
    key = part.model_dump_json()
    if key not in _loaded:
        if len(_loaded) >= MAX_LOADED:
            _loaded.clear()
        _loaded[key] = make_verifier(part)
    return _loaded[key]


def make_verifier(part: Part) -> Verifier:
    """The verifier that `part` names. Raises PluginError, also for what is none and could score nothing."""
    made: Verifier = load_part("verifiers", part.kind, part.options)
    score: Any = getattr(made, "score", None)
    if not inspect.iscoroutinefunction(inspect.unwrap(score)):
        has = "has no score" if score is None else "has a score that is not async"
        raise PluginError(f"verifiers {part.kind!r} {has}; give it `async def score(self, trace, sandbox)`")
    if not all(isinstance(getattr(made, name, None), str) for name in ("name", "version")):
        raise PluginError(
            f"verifiers {part.kind!r} has no name or no version, which every verdict records; "
            'give its class both as texts, like `name, version = "mine", "1"`'
        )
    return made
