"""The model of one turn with its optimiser, and how far the turn is: on disk after each update, whole or not at all."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from agentloop.config.sections import AlarmSection
from agentloop.errors import TrainingError, boundary
from agentloop.protocols import Draft
from agentloop.registry.artifacts import TRAINER
from agentloop.train.alarms import Alarm, AlarmWatch
from agentloop.train.algorithms.algorithm import Algorithm, Need
from agentloop.train.algorithms.sft import Sft
from agentloop.train.curriculum import Rates
from agentloop.train.data.row import Row, Unit
from agentloop.train.distributed import ALONE, Ranks
from agentloop.train.engine import Engine, EngineSettings
from agentloop.train.figures import SKIPPED, TOKENS, StepPhase, of
from agentloop.train.followers import Recipe, begin
from agentloop.train.state import checkpoint, checkpoints, read_progress, restore, save
from agentloop.train.trainers.hosts import Host
from agentloop.train.trainers.learning import Learning

GOES_BACK = "the turn goes on from the last good weights, at half the learning rate"
"""What follows from an alarm."""


@dataclass
class TurnState:
    """How far a turn is, and what it used so far."""

    made_from: str
    """Hash of everything that decides what the turn ends in, beside the attempts."""
    n_steps: int = 0
    n_updates: int = 0
    rates: list[Rates] = field(default_factory=list)
    """Of the curriculum, before the turn and after each of its steps."""
    consumed: list[int] = field(default_factory=list)
    """Numbers of the groups that were trained on."""
    discarded: list[int] = field(default_factory=list)
    """Numbers of those that were too old when they ended."""
    episodes: list[str] = field(default_factory=list)
    pairs: list[tuple[str, str]] = field(default_factory=list)
    sample: list[list[int]] = field(default_factory=list)
    """Token ids of a few rows of the last step, on which a server that gets its update is checked."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows and trajectories that did not train, by reason."""
    watched: list[dict[str, float]] = field(default_factory=list)
    """Figures of the steps that count for alarms."""
    marks: list[int] = field(default_factory=list)
    """Optimiser steps before each of those."""
    n_returns: int = 0
    """How often an alarm sent the turn back."""

    def learn_from(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Count each pair once."""
        self.pairs = list(dict.fromkeys([*self.pairs, *pairs]))


class Training:
    """What is trained in a turn, and by what."""

    def __init__(
        self,
        host: Host,
        algorithm: Algorithm,
        learning: Learning,
        draft: Draft,
        parent: Path | None,
        made_from: str,
        limits: AlarmSection,
        ranks: Ranks = ALONE,
    ) -> None:
        """parent: folder of the version that it goes on from. made_from: see `TurnState`.

        ranks: of other processes that share the updates, see `followers.leading`.
        """
        self.algorithm = algorithm
        self.learning = learning
        self._draft = draft
        host.check_room(draft.folder, has_reference=Need.reference in algorithm.needs)
        rng = draft.rng("adapter")
        self.trainable = host.load(
            parent, head=bool({Need.values, Need.rewards} & algorithm.needs), seed=rng.getrandbits(31)
        )
        settings = EngineSettings(learning_rate=host.learning_rate, max_tokens=learning.max_tokens)
        if self.trainable.recipe is not None:
            begin(ranks, Recipe(self.trainable.recipe, algorithm, settings))
        if Need.reference in algorithm.needs:
            self.trainable.keep_reference()
        self.engine = Engine(self.trainable, algorithm, settings, ranks=ranks)
        self.state = TurnState(made_from)
        self.is_resumed = self._restore(parent)
        self.alarms = AlarmWatch(limits, self.state.watched, self.state.n_returns)

    def _restore(self, parent: Path | None) -> bool:
        """Go on from the checkpoint of an interrupted process, else from the moments of the parent. Whether the first.

        Raises TrainingError for a state that is broken.
        """
        saved = checkpoints(self._draft.workspace)
        if saved:
            progress = read_progress(saved[-1])
            if progress["made_from"] == self.state.made_from:
                restore(self.engine, saved[-1])
                pairs = [(trace, verdict) for trace, verdict in progress["pairs"]]
                self.state = TurnState(**{**progress, "pairs": pairs, "dropped": Counter(progress["dropped"])})
                return True
            shutil.rmtree(self._draft.workspace)
        moments = parent / TRAINER if parent else None
        rates = restore(self.engine, moments)["rates"] if moments and moments.is_dir() else {}
        self.state.rates = [rates]
        return False

    def checkpoint(self) -> None:
        """Make this the state from which an interrupted process goes on. Raises TrainingError on a full disk."""
        good = self.alarms.good
        mark = None if good is None else self.state.marks[good]
        checkpoint(self.engine, self._draft.workspace, vars(self.state), good=mark)

    def watch(self, figures: Mapping[str, float], mark: int) -> Alarm | None:
        """Look at the figures of a step; where they raise an alarm, put back the weights before the last good step.

        mark: optimiser steps before it. The turn goes on: what it has used stays used. Raises TrainingError at one
        alarm too many.
        """
        state = self.state
        state.marks.append(mark)
        raised = self.alarms.after(figures)
        if raised is not None:
            self._go_back(state.marks[raised.back_to])
            state.n_returns = self.alarms.n_returns
            del state.marks[raised.since :]
        state.watched = self.alarms.history
        return raised

    def _go_back(self, mark: int) -> None:
        """To the newest checkpoint of at most `mark` optimiser steps, else the oldest; later ones are removed."""
        places = checkpoints(self._draft.workspace)
        older = [path for path in places if int(path.name) <= mark]
        chosen = older[-1] if older else places[0]
        restore(self.engine, chosen)
        self.engine.ranks.wait()
        for path in places:
            if self.engine.ranks.is_first and int(path.name) > int(chosen.name):
                shutil.rmtree(path)

    def step(self, units: Sequence[Unit], rate: float) -> dict[str, float]:
        """One optimiser step at `rate` times the learning rate; its figures."""
        figures = self.engine.step(self.engine.prepared(units), rate)
        self.state.n_updates += 1
        return figures

    def update(self, units: Sequence[Unit], rng: random.Random, rate: float) -> dict[str, float]:
        """Optimiser steps on `units`, each on a mixture of them; their figures, means by step, of counts the sums.

        Were units sorted by length to save padding, a step would see a group's failures without its successes.
        """
        mixed = self.engine.prepared(units)
        rng.shuffle(mixed)
        totals: Counter[str] = Counter()
        steps = list(parts(mixed, self.learning.rows_per_update))
        for step in steps:
            totals.update(self.engine.step(step, rate))
            self.state.n_updates += 1
        means = {name: total / len(steps) for name, total in totals.items()}
        return means | {name: totals[name] for name in (SKIPPED, of(TOKENS, StepPhase.train))}

    def imitate(self, rows: Sequence[Row], rate: float) -> dict[str, float]:
        """One supervised step on rows that once succeeded: how a pool that only fails is revived."""
        sft = Sft()
        units, _ = sft.prepare(rows)
        return self.engine.step(units, rate, algorithm=sft)

    def save(self) -> None:
        """Write the version, and what the turn after it goes on from, to the draft's folder."""
        with boundary(TrainingError, "cannot save a version; mend it and run the same command again"):
            self.trainable.save(self._draft.folder)
            is_exact = self.trainable.dtype == torch.float32
            save(self.engine, self._draft.folder / TRAINER, {"rates": self.state.rates[-1]}, weights=not is_exact)


def parts(units: Sequence[Unit], n_rows: int) -> Iterator[Sequence[Unit]]:
    """`units` in parts of nearly equal size, about `n_rows` rows each, in the order given."""
    n_all = sum(len(unit) for unit in units)
    n = min(len(units), -(-n_all // n_rows))
    for i in range(n):
        yield units[i * len(units) // n : (i + 1) * len(units) // n]
