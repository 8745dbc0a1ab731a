"""Labels to a scorer: `fit` learns each head that there are labels enough for, and measures how sure it may be.

The benchmark asks the same functions, head by head, for what they say of traces that were held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from agentloop.errors import ConfigError, counted
from agentloop.failures.closing import blamable
from agentloop.failures.learned.calibration import fit_measured, held_out
from agentloop.failures.learned.features import rows
from agentloop.failures.learned.fitted import RUN_C, Linear, StepModel, fit_linear, fit_steps, library
from agentloop.failures.learned.run_features import run_row
from agentloop.failures.learned.scorer import RunHead, Scorer, StepHead, likeliest, only
from agentloop.types import FailureType, Trace

MIN_LABELS, MIN_TASKS = 20, 10
"""What a head needs before it is fitted at all; `docs` say how good it is with more."""


@dataclass(frozen=True)
class ScorerExample:
    """A trace and what is known of it; None for what is not."""

    trace: Trace
    task: str
    """Traces of one task never stand on both sides of a cross-validation."""
    step: int | None = None
    """Index of the critical step."""
    category: str | None = None
    """Its type: a leaf of the taxonomy, ours or the project's own."""

    @cached_property
    def rows(self) -> list[list[float]]:
        """Of the steps, computed once."""
        return rows(self.trace)

    @cached_property
    def place(self) -> int | None:
        """Where the critical step stands among the steps; None where nobody said, or it is none of them."""
        return next((n for n, step in enumerate(self.trace.steps) if step.index == self.step), None)


def fit(labelled: Sequence[ScorerExample], *, seed: int = 0, precision: float = 0.5) -> Scorer:
    """Learn what the labels are enough for; the same labels and seed give the same scorer.

    precision: share of the scorer's claims that should be right; the higher, the more often it abstains.

    Raises ConfigError when no head has MIN_LABELS labels of MIN_TASKS tasks (saying what there is), for a category
    that is no leaf, and without scikit-learn.
    """
    for item in labelled:
        if item.category is not None:
            _check(item.category)
    stepped = [item for item in labelled if item.place is not None and len(item.rows) > 1]
    typed = [item for item in labelled if item.category is not None and item.rows]
    can_steps = _enough(stepped)
    can_types = _enough(typed) and len({item.category for item in typed}) > 1
    if not (can_steps or can_types):
        raise ConfigError(
            f"too few labels to fit a scorer: critical steps {_count(stepped)}, types {_count(typed)}; it needs "
            f"{MIN_LABELS} of {MIN_TASKS} tasks in one of them (types: of two kinds); label more traces"
        )
    library("sklearn")
    used = {id(item): item for item in (*stepped, *typed)}.values()
    return Scorer(
        n_labels=len(used),
        n_tasks=len({item.task for item in used}),
        precision=precision,
        steps=_step_head(stepped, seed, precision) if can_steps else None,
        categories=_category_head(typed, seed, precision) if can_types else None,
    )


# ------------------------------------------------------------------ what models say of held-out traces


def held_out_steps(items: Sequence[ScorerExample], seed: int, also: Sequence[ScorerExample] = ()) -> list[list[float]]:
    """Probabilities of each item's steps, by models that were fitted on other tasks, of `also` too."""
    more = [(item, item.task) for item in also]
    return held_out(items, _tasks(items), seed, lambda some: step_model(some, seed), ask_steps, more)


def held_out_categories(items: Sequence[ScorerExample], seed: int) -> list[dict[str, float]]:
    """Probabilities of each category for each item, as above."""
    return held_out(items, _tasks(items), seed, category_model, ask_category)


def step_model(items: Sequence[ScorerExample], seed: int) -> StepModel:
    """Learned of the items whose critical step is known and not the only one."""
    pairs = [(item.rows, item.place) for item in items if item.place is not None and len(item.rows) > 1]
    return fit_steps([table for table, _ in pairs], [place for _, place in pairs], seed)


def ask_steps(model: StepModel, item: ScorerExample) -> list[float]:
    """Probabilities of its steps, of those that may be named."""
    return only(model.probabilities(item.rows), blamable(item.trace))


def category_model(items: Sequence[ScorerExample]) -> Linear:
    """Learned of the items whose category is known."""
    some = [item for item in items if item.category is not None]
    return fit_linear([_row(item) for item in some], [item.category or "" for item in some], RUN_C)


def ask_category(model: Linear, item: ScorerExample) -> dict[str, float]:
    """Probabilities of its categories."""
    return model.probabilities(_row(item))


# ------------------------------------------------------------------------------------------ heads


def _step_head(items: list[ScorerExample], seed: int, precision: float) -> StepHead:
    """Its curve is measured on held-out traces, before it learns from all."""
    answers = held_out_steps(items, seed)
    guesses = [likeliest(p) for p in answers]
    right = [guess == item.place for guess, item in zip(guesses, items, strict=True)]
    sure = [p[guess] for p, guess in zip(answers, guesses, strict=True)]
    trust = fit_measured(sure, right, _tasks(items), precision, seed)
    every = trust.model_copy(update={"n_said": len(items), "n_right": sum(right)})
    chance = fmean(1 / max(1, sum(blamable(item.trace))) for item in items)
    return StepHead(model=step_model(items, seed), trust=every, chance=chance)


def _category_head(items: list[ScorerExample], seed: int, precision: float) -> RunHead:
    answers = held_out_categories(items, seed)
    best = [max(p, key=lambda name, p=p: p[name]) for p in answers]  # type: ignore[misc]
    right = [guess == item.category for guess, item in zip(best, items, strict=True)]
    sure = [p[guess] for p, guess in zip(answers, best, strict=True)]
    trust = fit_measured(sure, right, _tasks(items), precision, seed)
    return RunHead(model=category_model(items), trust=trust)


# --------------------------------------------------------------------------------- what they share


def _row(item: ScorerExample) -> list[float]:
    return run_row(item.trace, steps=item.rows)


def _tasks(items: Sequence[ScorerExample]) -> list[str]:
    return [item.task for item in items]


def _enough(items: Sequence[ScorerExample]) -> bool:
    return len(items) >= MIN_LABELS and len({item.task for item in items}) >= MIN_TASKS


def _count(items: Sequence[ScorerExample]) -> str:
    return f"{len(items)} of {counted(len({item.task for item in items}), 'task')}"


def _check(category: str) -> None:
    try:
        FailureType(category)
    except ValueError:
        raise ConfigError(f"{category!r} is no type of failure; types are such as {FailureType.obs_misread}") from None
