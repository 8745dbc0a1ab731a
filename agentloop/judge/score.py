"""Trace -> Verdict: run the task's verifiers, combine their numbers, say what went wrong.

The state is what keeps training honest. Only `scored` carries a reward; what broke and what could
not be graded has none, rather than a 0. Nothing here runs the agent or writes to a store.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from numbers import Real
from pathlib import Path
from traceback import walk_tb
from typing import Any, cast

from agentloop.errors import NotYet, PluginError
from agentloop.judge.combine import check, combine, decided
from agentloop.judge.failures.critical import classify
from agentloop.judge.failures.rules import Rule
from agentloop.judge.failures.taxonomy import VERSION
from agentloop.plugins import load_part
from agentloop.protocols import GroupVerifier, Sandbox, Verifier
from agentloop.types import WAITING, Graded, Part, RewardState, Score, StopReason, Task, Trace, Verdict

FreshBox = Callable[[Sequence[str]], AbstractAsyncContextManager[Sandbox]]
"""Paths of artifacts -> a fresh box that has them in their places (`artifacts.py`)."""

TIMEOUT_S = 60.0
"""Wall time of one verifier. It ends what awaits; code that blocks the loop is its author's own to bound."""
MAX_LOADED = 4096
"""Verifiers kept between traces; a suite repeats its tasks, and building one costs more than running it."""
MAX_WORDS = 500
"""Characters kept of what a verifier raised: it may quote a whole answer."""
ENGINE = Path(__file__).parents[1]
AS = "as"
"""The option that names a verifier's score. A word that no constructor can have for a parameter."""
ALONE = "compares the episodes of a group, and there was only one"
NEEDS_BOX = "needs the agent's box, which is gone; run the task again"
_loaded: dict[str, Verifier] = {}


async def judge(
    task: Task,
    trace: Trace,
    verifiers: Sequence[Verifier] | None = None,
    *,
    load: Callable[[Part], Verifier] | None = None,
    kept: Mapping[str, Score] = {},
    fresh: FreshBox | None = None,
    guess: Rule | None = None,
) -> Verdict:
    """The worth of a finished trace, and why.

    verifiers: in place of the task's own, which `load` makes from its parts (installed ones by
    default, kept between calls). `combine.py` makes the reward from their values, as the task's rule says.
    kept: scores that are there already, by verifier; those are not asked.
    fresh: makes the box of a verifier that names `artifacts`, which without it gives no number.
    guess: of `classify`.

    - `infra_failed`: the trace broke, or a reference command timed out and nothing went wrong
      before it. Verifiers are not run. Any other timeout is the agent's own and is scored, so that
      no policy escapes a reward with `sleep 999`.
    - `unscored`: there is no verifier, or one raised, took more than TIMEOUT_S or gave no number in
      [0, 1]. One bad verifier is enough: a mean of the others would be another reward. Its score says why.
    - `disputed`: verifiers contradict each other.

    Raises PluginError when a verifier cannot be made, ConfigError for a rule that does not fit: a task's
    mistake, not a trace's.
    """
    if broke(task, trace):
        return _verdict(task, trace, RewardState.infra_failed)
    named = name_verifiers(task, verifiers, load)
    if not named:
        reason = Score(verifier="none", version="0", value=None, error=f"task {task.id} names no verifier")
        failures = classify(task, trace, RewardState.unscored)
        return Verdict(
            trace_id=trace.id, state=RewardState.unscored, reward=None, scores=(reason,), failures=failures,
            taxonomy=VERSION, rule=task.reward,
        )  # fmt: skip
    scores: dict[str, Score] = {}
    for name in _in_order(task, named):
        scores[name] = kept[name] if name in kept else await _score(named[name], name, trace, fresh)
        if decided(task.reward, tuple(scores.values())):
            break
    return verdict_of(task, trace, tuple(scores[name] for name in named if name in scores), guess)


def verdict_of(task: Task, trace: Trace, scores: tuple[Score, ...], guess: Rule | None = None) -> Verdict:
    """The verdict that follows from scores. guess: of `classify`."""
    return _verdict(task, trace, *combine(task.reward, scores), scores, guess)


def name_verifiers(
    task: Task, verifiers: Sequence[Verifier] | None = None, load: Callable[[Part], Verifier] | None = None
) -> dict[str, Verifier]:
    """A task's verifiers by the names that their scores have: `as` of the part, else the verifier's own.

    Two of one name are told apart by a number: `regex`, `regex-2`.
    """
    named: dict[str, Verifier] = {}
    wanted = [None] * len(verifiers) if verifiers is not None else [part.options.get(AS) for part in task.verifiers]
    made = verifiers if verifiers is not None else [(load or _installed)(part) for part in task.verifiers]
    for name, verifier in zip(wanted, made, strict=True):
        name = first = str(name or verifier.name)
        for n in range(2, len(made) + 2):
            if name not in named:
                break
            name = f"{first}-{n}"
        named[name] = verifier
    check(task.reward, list(named), task.id)
    return named


def _in_order(task: Task, named: Mapping[str, Verifier]) -> list[str]:
    """Gates first, then what costs nothing: a judge model is asked when its word can still matter."""
    gates = task.reward.gates if task.reward and task.reward.combine == "gated" else ()
    if not gates and len(named) == 1:
        return list(named)
    return sorted(named, key=lambda name: (name not in gates, getattr(named[name], "paid", False)))


def broke(task: Task, trace: Trace) -> bool:
    """True when what ended or decided the trace was not the agent's doing."""
    if trace.error is not None or trace.stop_reason is StopReason.error:
        return True
    if not any(result.timed_out for step in trace.steps for result in step.results):
        return False
    failures = classify(task, trace, RewardState.infra_failed)
    return any(failure.critical and failure.type.is_infra for failure in failures)


async def _score(verifier: Verifier, name: str, trace: Trace, fresh: FreshBox | None) -> Score:
    """One verifier's score; a value that cannot be used is reported as it was, never clipped."""
    if not hasattr(verifier, "score"):
        return no_score(verifier, name, ALONE)
    artifacts: Sequence[str] = getattr(verifier, "artifacts", ())
    time_s: float = getattr(verifier, "timeout_s", TIMEOUT_S)
    limit = asyncio.timeout(time_s)
    try:
        async with limit:
            if not artifacts:
                value = await verifier.score(trace, None)
            elif fresh is None:
                return no_score(verifier, name, NEEDS_BOX)
            else:
                async with fresh(artifacts) as box:
                    value = await verifier.score(trace, box)
    except NotYet as error:
        return no_score(verifier, name, f"{WAITING}{error}")
    except (Exception, SystemExit) as error:  # a plugin may raise anything, and none of it may become a reward
        return no_score(verifier, name, _late(time_s) if limit.expired() else raised(error))
    if limit.expired():  # it caught its own cancellation
        return no_score(verifier, name, _late(time_s))
    return checked(verifier, name, value)


def checked(verifier: Verifier | GroupVerifier, name: str, value: object) -> Score:
    """What a verifier gave as a score, which has no value when that was not a number in [0, 1]."""
    graded = value if isinstance(value, Graded) else None
    number = graded.value if graded else value
    spent = graded.model_dump(exclude={"value", "error"}) if graded else {}
    if graded and graded.error is not None:
        return Score(verifier=name, version=verifier.version, value=None, error=graded.error[:MAX_WORDS], **spent)
    if not isinstance(number, Real) or not 0.0 <= cast(float, number) <= 1.0:
        said = f"gave {number!r:.100}, not a number in [0, 1]"
        return Score(verifier=name, version=verifier.version, value=None, error=said, **spent)
    return Score(verifier=name, version=verifier.version, value=float(number), **spent)


def raised(error: Exception | SystemExit) -> str:
    """`KeyError: 'x' (verifier.py:12)`: on one line, with the last place in the verifier's file when it is not ours."""
    words = " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())[:MAX_WORDS]
    said = f"{type(error).__name__}: {words}" if words else type(error).__name__
    _, *inside = [(Path(frame.f_code.co_filename), line) for frame, line in walk_tb(error.__traceback__)]
    if not inside or inside[0][0].is_relative_to(ENGINE):
        return said
    file = inside[0][0]
    return f"{said} ({file.name}:{[line for path, line in inside if path == file][-1]})"


def _late(time_s: float) -> str:
    return f"timed out after {time_s:g} s"


def no_score(verifier: Verifier | GroupVerifier, name: str, why: str) -> Score:
    """Why a verifier gave no number."""
    return Score(verifier=name, version=verifier.version, value=None, error=why)


def _verdict(
    task: Task,
    trace: Trace,
    state: RewardState,
    reward: float | None = None,
    scores: tuple[Score, ...] = (),
    guess: Rule | None = None,
) -> Verdict:
    # A grader that waits has not failed.
    failures = classify(task, trace, state, reward, tuple(score for score in scores if not score.waiting), guess=guess)
    return Verdict(
        trace_id=trace.id, state=state, reward=reward, scores=scores, failures=failures, taxonomy=VERSION,
        rule=task.reward,
    )  # fmt: skip


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
    options = {key: value for key, value in part.options.items() if key != AS}
    made: Verifier = load_part("verifiers", part.kind, options)
    score: Any = getattr(made, "score", None) or getattr(made, "rank", None)
    if not inspect.iscoroutinefunction(inspect.unwrap(score)):
        has = "has no score" if score is None else "has a score that is not async"
        raise PluginError(f"verifiers {part.kind!r} {has}; give it `async def score(self, trace, sandbox)`")
    if not all(isinstance(getattr(made, name, None), str) for name in ("name", "version")):
        raise PluginError(
            f"verifiers {part.kind!r} has no name or no version, which every verdict records; "
            'give its class both as texts, like `name, version = "mine", "1"`'
        )
    return made
