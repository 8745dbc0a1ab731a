"""The models inside a learned scorer: fitted by scikit-learn, kept as plain numbers, asked without it.

What is stored is JSON that can be read, compared and checked; nothing is pickled, so a file from elsewhere runs no
code. Small and strongly regularised on purpose: people label hundreds of runs, not millions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

from pydantic import FiniteFloat, model_validator

from agentloop.errors import ConfigError, extra
from agentloop.types import Frozen

Rows = Sequence[Sequence[float]]
SURE = 1e-3
"""A forest's probability stays this far from 0 and 1: no leaf of five examples knows more."""
STEP_C, RUN_C = 0.02, 0.03
"""Inverse strength of regularisation of the linear models of steps and of runs (scikit-learn's C)."""
N_TREES = 40


class Linear(Frozen):
    """Logistic regression over standardised columns; one row of weights for each class, or one for two classes."""

    mean: tuple[FiniteFloat, ...]
    scale: tuple[FiniteFloat, ...]
    weights: tuple[tuple[FiniteFloat, ...], ...]
    intercepts: tuple[FiniteFloat, ...]
    classes: tuple[str, ...]

    @model_validator(mode="after")
    def _fits(self) -> Linear:
        n = len(self.mean)
        if len(self.scale) != n or any(len(row) != n for row in self.weights) or not all(self.scale):
            raise ValueError("weights, means and scales of different lengths, or a scale of 0")
        if not len(self.weights) == len(self.intercepts) == (1 if len(self.classes) == 2 else len(self.classes)):
            raise ValueError("as many rows of weights as classes, or one for two")
        return self

    def log_odds(self, x: Any) -> Any:
        """Of the second of two classes against the first: (rows, columns) -> (rows,)."""
        return self._scores(x)[:, 0]

    def probabilities(self, row: Sequence[float]) -> dict[str, float]:
        """Class -> probability, summing to 1."""
        np = library("numpy")
        scores = self._scores(np.asarray([row]))[0]
        scores = np.array([0.0, scores[0]]) if len(self.classes) == 2 else scores
        return dict(zip(self.classes, softmax(scores).tolist(), strict=True))

    def _scores(self, x: Any) -> Any:
        mean, scale, weights, intercepts = self._arrays
        return (x - mean) / scale @ weights.T + intercepts

    @cached_property
    def _arrays(self) -> tuple[Any, ...]:
        np = library("numpy")
        return tuple(np.asarray(part, dtype=float) for part in (self.mean, self.scale, self.weights, self.intercepts))


class Forest(Frozen):
    """Decision trees whose answers are averaged, one after another in the same lists.

    `left` and `right` are places in the lists, -1 in a leaf; `value` is a leaf's probability.
    """

    roots: tuple[int, ...]
    feature: tuple[int, ...]
    threshold: tuple[FiniteFloat, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    value: tuple[FiniteFloat, ...]

    @model_validator(mode="after")
    def _ends(self) -> Forest:
        n = len(self.value)
        if not n or any(len(part) != n for part in (self.feature, self.threshold, self.left, self.right)):
            raise ValueError("a forest's lists are empty or of different lengths")
        if not self.roots or not all(0 <= root < n for root in self.roots):
            raise ValueError("a forest's roots are not in it")
        for place, (left, right) in enumerate(zip(self.left, self.right, strict=True)):
            if (left, right) != (-1, -1) and not (place < left < n and place < right < n and self.feature[place] >= 0):
                raise ValueError("a tree's children must come after their parent")
        return self

    def log_odds(self, x: Any) -> Any:
        """(rows, columns) -> (rows,)."""
        np = library("numpy")
        roots, feature, threshold, children, value = self._arrays
        cells = x.astype(np.float32).ravel()  # as scikit-learn does before it compares
        row, node = np.arange(len(x))[:, None] * x.shape[1], np.tile(roots, (len(x), 1))
        while True:
            is_right = cells.take(row + feature.take(node)) > threshold.take(node)
            below = children.take(2 * node + is_right)
            if (below == node).all():
                break
            node = below
        p = np.clip(value.take(node).mean(axis=1), SURE, 1 - SURE)
        return np.log(p / (1 - p))

    @cached_property
    def _arrays(self) -> tuple[Any, ...]:
        np = library("numpy")
        feature = np.maximum(self.feature, 0)  # a leaf has none
        pairs, here = np.stack([self.left, self.right], axis=1), np.arange(len(self.left))[:, None]
        children = np.where(pairs < 0, here, pairs).ravel()  # a leaf is its own child
        return np.array(self.roots), feature, np.array(self.threshold), children, np.array(self.value)


class StepModel(Frozen):
    """Which step of a failed run is the critical one: the mean opinion of four small models.

    Two compare all steps of a run with one another; two ask of each step, given that none before was it, whether it
    is (a discrete hazard): the critical step is the first from which the run did not recover.
    """

    linear: Linear
    forest: Forest
    first_linear: Linear
    first_forest: Forest

    def probabilities(self, table: Rows) -> list[float]:
        """One for each step, summing to 1; [] of none."""
        if not table:
            return []
        np = library("numpy")
        x = np.asarray(table, dtype=float)
        said = [softmax(model.log_odds(x)) for model in (self.linear, self.forest)]
        for model in (self.first_linear, self.first_forest):
            z = model.log_odds(x)
            none_before = np.concatenate([[0.0], np.cumsum(-np.logaddexp(0, z))[:-1]])
            said.append(softmax(none_before - np.logaddexp(0, -z)))
        p: list[float] = np.mean(said, axis=0).tolist()
        return p


def softmax(scores: Any) -> Any:
    """Probabilities, summing to 1."""
    powers = library("numpy").exp(scores - scores.max())
    return powers / powers.sum()


def fit_steps(tables: Sequence[Rows], critical: Sequence[int], seed: int) -> StepModel:
    """Learn from runs which of their rows is the critical one; a long run weighs as much as a short one.

    Raises ConfigError without scikit-learn.
    """
    np = library("numpy")
    x = np.concatenate([np.asarray(table, dtype=float) for table in tables])
    off = np.concatenate([np.arange(len(table)) - at for table, at in zip(tables, critical, strict=True)])
    others = np.concatenate([np.full(len(table), 1 / max(1, len(table) - 1)) for table in tables])
    weight, until = np.where(off == 0, 1.0, others), off <= 0
    first, y = x[until], np.where(off == 0, "critical", "")
    return StepModel(
        linear=fit_linear(x, y, STEP_C, weight),
        forest=fit_forest(x, off == 0, seed, weight),
        first_linear=fit_linear(first, y[until], STEP_C),
        first_forest=fit_forest(first, (off == 0)[until], seed),
    )


def fit_linear(x: Any, y: Sequence[str], c: float, weight: Any = None) -> Linear:
    """Logistic regression of the classes `y` on rows `x`; of one class only, a model that is sure of it.

    Raises ConfigError without scikit-learn.
    """
    scaler = library("sklearn.preprocessing").StandardScaler().fit(x)
    if len(set(y)) == 1:
        n = len(scaler.mean_)
        zero = (0.0,) * n
        return Linear(mean=zero, scale=(1.0,) * n, weights=(zero,), intercepts=(0.0,), classes=(y[0],))
    model = library("sklearn.linear_model").LogisticRegression(C=c, max_iter=3000)
    model.fit(scaler.transform(x), list(y), sample_weight=weight)
    return Linear(
        mean=tuple(scaler.mean_.tolist()),
        scale=tuple(scaler.scale_.tolist()),
        weights=tuple(map(tuple, model.coef_.tolist())),
        intercepts=tuple(model.intercept_.tolist()),
        classes=tuple(map(str, model.classes_)),
    )


def fit_forest(x: Any, y: Any, seed: int, weight: Any = None) -> Forest:
    """A random forest of two classes, False and True."""
    np = library("numpy")
    made = library("sklearn.ensemble").RandomForestClassifier(
        N_TREES, min_samples_leaf=5, max_features=0.3, random_state=seed, n_jobs=1
    )
    trees = [one.tree_ for one in made.fit(x, y, sample_weight=weight).estimators_]
    roots = np.cumsum([0, *(tree.node_count for tree in trees)])

    def places(side: str) -> Any:
        sides = [getattr(tree, side) for tree in trees]
        return np.concatenate([np.where(at < 0, -1, at + root) for at, root in zip(sides, roots, strict=False)])

    said = np.concatenate([tree.value[:, 0, :] for tree in trees])
    value = said[:, 1] / said.sum(axis=1) if said.shape[1] > 1 else np.full(len(said), float(made.classes_[0]))
    return Forest(
        roots=tuple(roots[:-1].tolist()),
        feature=tuple(np.concatenate([tree.feature for tree in trees]).tolist()),
        threshold=tuple(np.concatenate([tree.threshold for tree in trees]).tolist()),
        left=tuple(places("children_left").tolist()),
        right=tuple(places("children_right").tolist()),
        value=tuple(value.tolist()),
    )


def library(name: str) -> Any:
    """numpy, or a part of scikit-learn, loaded when first asked for. Raises ConfigError with the remedy."""
    try:
        return import_module(name)
    except ImportError:
        raise ConfigError(f"a learned scorer needs scikit-learn; {extra('judge')}") from None
