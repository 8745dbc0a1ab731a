"""The trainer `gepa` in 20 shops whose conventions nobody wrote down (`agentloop/demo/shop.py`): is its gain true?

    python benchmarks/overlay.py                 20 worlds, some minutes
    python benchmarks/overlay.py --worlds 3      a look

The seeds are words of SHA-256 of the commit, so nobody chose them. In each world: a turn of the trainer on 40 train and
30 validation tasks, in at most 400 attempts; the gate's fold on 60 held-out tasks with the claim `better`, in at most
600; and the promoted version measured afresh, which is the number that a report leads with. Beside it: the same turn
with rewards alone, the same turn while 20% of the attempts are lost to infrastructure, and `gepa.optimize` as shipped,
with the same feedback and the same number of calls of the model. `true` is computed, not measured: the share of
held-out tasks that a model without slips solves, less its slips. The last line is JSON; the exit status is 1 where a
goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from unittest.mock import patch

from gepa.api import optimize
from gepa.core.adapter import EvaluationBatch
from scipy.stats import t as student

from agentloop.demo.shop import ShopModel, ShopRewriter, World
from agentloop.errors import SandboxGone
from agentloop.gate.fold import Fold
from agentloop.gate.losses import Claim
from agentloop.gate.outcomes import GateVerdict, Header, Outcome, Settings, Side, SuitePart
from agentloop.sandbox.absent import AbsentBackend, AbsentSandbox
from agentloop.testing.experience import MemoryDraft, MemoryExperience
from agentloop.train.trainers import search
from agentloop.train.trainers.components import overlay_of, read_overlay
from agentloop.train.trainers.feedback import described, evidence_of
from agentloop.train.trainers.gepa import Gepa
from agentloop.train.trainers.repair import Repair
from agentloop.train.trainers.search import Quiet
from agentloop.types import Attempt, Overlay, PolicyVersion, RewardState, SandboxSpec, Split, Task, VersionKind

N_TRAIN, N_VALIDATION, N_HELD_OUT = 40, 30, 60
MAX_SEARCH = 400
MAX_GATE = 600
ALPHA = 0.05 * 6 / math.pi**2
"""Risk of a project's first candidate."""
N_AFRESH = 10
"""Attempts at each held-out task by which a promoted version, and the one before it, are measured."""
LOST = 0.2
PARENT = PolicyVersion(
    number=1,
    parent=None,
    kind=VersionKind.settings,
    artifact=None,
    sha256="0" * 64,
    config_hash="",
    created_at=datetime.now(UTC),
)


class Losing(AbsentBackend):
    """Loses a share of the sandboxes."""

    def __init__(self, share: float, seed: int) -> None:
        self._share = share
        self._rng = random.Random(seed)

    async def create(self, spec: SandboxSpec) -> AbsentSandbox:
        """See `protocols.SandboxBackend`."""
        if self._rng.random() < self._share:
            raise SandboxGone("the engine has gone")
        return await super().create(spec)


class RewardsAlone(MemoryExperience):
    """Experience whose verdicts name no failure."""

    async def attempts(self, tasks: Sequence[Task], **options: Any) -> list[Attempt]:
        """See `protocols.Experience`."""
        attempts = await super().attempts(tasks, **options)
        return [
            attempt.model_copy(update={"verdict": attempt.verdict.model_copy(update={"failures": ()})})
            for attempt in attempts
        ]


@dataclass(frozen=True)
class Turn:
    """What one way of searching made of a world."""

    overlay: Overlay
    gain: float
    """True, in share of held-out tasks."""
    n_calls: int
    """Of the model, in the search."""
    figures: Mapping[str, float]

    @property
    def per_1000(self) -> float:
        """Gain per 1,000 calls."""
        return 1000 * self.gain / max(1, self.n_calls)


@dataclass(frozen=True)
class Row:
    """One world."""

    seed: int
    n_conventions: int
    before: float
    after: float
    promoted: bool
    n_search: int
    n_gate: int
    n_forks: int
    n_saved: int
    n_unforked: int
    """Attempts of the same search where no text is tried on a failing step first."""
    unforked_per_1000: float
    reported_bias: float
    """Gain of the fresh measurement minus true gain."""
    chosen_bias: float
    """Gain on validation, by which the version was chosen, minus true gain."""
    per_1000: float
    gain_rewards: float
    gain_lossy: float
    n_lost: int
    n_made_up: int
    """Attempts without a reward that were learned from."""
    gepa_gain: float
    gepa_per_1000: float
    gepa_bias: float

    @property
    def gain(self) -> float:
        """True."""
        return self.after - self.before


class Bench:
    """One world with its tasks, and what acts in it."""

    def __init__(self, seed: int, runner: asyncio.Runner) -> None:
        self.world = World.of(seed)
        self.seed = seed
        self.runner = runner
        self.train = self.world.tasks(Split.train, N_TRAIN)
        self.validation = self.world.tasks(Split.validation, N_VALIDATION)
        self.held_out = self.world.tasks(Split.heldout, N_HELD_OUT)

    def experience(self, model: ShopModel, *, labels: bool = True, share_lost: float = 0.0) -> MemoryExperience:
        """labels: False hides what went wrong. share_lost: of attempts."""
        kind = MemoryExperience if labels else RewardsAlone
        return kind(
            self.train,
            self.validation,
            self.world.agent(),
            model,
            texts=self.world.texts(),
            held_out=self.held_out,
            backend=Losing(share_lost, self.seed),
        )

    def truth(self, overlay: Overlay) -> float:
        """Success on the held-out tasks: of a model without slips, less the slips."""
        model = ShopModel(slips=False)
        attempts = self.runner.run(self.experience(model).make(self.held_out, None, overlay, "truth"))
        return fmean(attempt.verdict.reward or 0.0 for attempt in attempts) * (1 - model.slip)

    def turn(self, **options: Any) -> tuple[Turn, MemoryExperience, MemoryDraft]:
        """A turn of the shipped trainer."""
        model = ShopModel()
        experience = self.experience(model, **options)
        draft = MemoryDraft(Path(tempfile.mkdtemp(prefix="agentloop-overlay-")) / "v0002", seed=self.seed)
        rewriter = {"kind": "agentloop.demo.shop:ShopRewriter"}
        trainer = Gepa(rewriter, max_attempts=MAX_SEARCH, lessons=0)
        self.runner.run(trainer.improve(PARENT, draft, experience))
        overlay = read_overlay(draft.folder)
        gain = self.truth(overlay) - self.truth(Overlay())
        return Turn(overlay, gain, model.n_calls, draft.figures), experience, draft

    def as_shipped(self, n_calls: int) -> tuple[float, float]:
        """(true gain, gain on its validation tasks) of `gepa.optimize` with its defaults, in so many calls."""
        model = ShopModel()
        adapter = Shipped(self, model)
        rewriter = ShopRewriter()
        result = optimize(
            {component.name: component.text for component in self.world.texts()},
            trainset=self.train,
            valset=self.validation,
            adapter=adapter,
            reflection_lm=lambda prompt: rewriter.answer(str(prompt), rewriter.n_calls),
            stop_callbacks=lambda state: model.n_calls >= n_calls,
            logger=Quiet(),
            seed=self.seed,
        )
        overlay = adapter.overlay(result.candidates[result.best_idx])
        scores = result.val_aggregate_scores
        return self.truth(overlay) - self.truth(Overlay()), scores[result.best_idx] - scores[0]

    def gate(self, overlay: Overlay) -> tuple[GateVerdict, int]:
        """(verdict, attempts of both sides) of the fold with the claim `better`."""
        n_trials = MAX_GATE // 2 // len(self.held_out)
        tasks = tuple(task.id for task in self.held_out)
        settings = Settings(claim=Claim.better, alpha=ALPHA, delta=0.4, max_infra=0.1, max_rollouts=MAX_GATE + 1)
        part = SuitePart(name="held-out", hash=str(self.seed), tasks=tasks)
        fold = Fold(Header(settings=settings, suites=(part,), bank_trials=0, controls=1), looks=False)
        experience = self.experience(ShopModel())
        n_attempts = 0
        for side, words in ((Side.baseline, Overlay()), (Side.candidate, overlay)):
            for trial in range(n_trials):
                if fold.decided is not None:
                    break
                stage = f"gate/{side}/{trial}"
                attempts = self.runner.run(experience.make(self.held_out, None, words, stage))
                n_attempts += len(attempts)
                for attempt in attempts:
                    fold.add(outcome_of(attempt, side, trial), last=True)
        fold.close()
        return fold.decided or GateVerdict.inconclusive, n_attempts

    def afresh(self, overlay: Overlay) -> float:
        """Success in new attempts."""
        experience = self.experience(ShopModel())
        attempts = self.runner.run(experience.make(self.held_out, None, overlay, "afresh", N_AFRESH))
        return fmean(attempt.verdict.reward or 0.0 for attempt in attempts)


class Shipped:
    """An adapter as gepa's documentation has it: rewards, and what went wrong as feedback."""

    propose_new_texts = None

    def __init__(self, bench: Bench, model: ShopModel) -> None:
        self._bench = bench
        self._experience = bench.experience(model)
        self._components = {component.name: component for component in bench.world.texts()}
        self._n = 0

    def overlay(self, texts: Mapping[str, str]) -> Overlay:
        """Of a candidate."""
        return overlay_of(texts, self._components, Overlay())

    def evaluate(
        self, batch: list[Task], candidate: dict[str, str], capture_traces: bool = False
    ) -> EvaluationBatch[Attempt, float]:
        """See gepa's GEPAAdapter."""
        self._n += 1
        overlay = self.overlay(candidate)
        attempts = self._bench.runner.run(self._experience.make(batch, None, overlay, f"shipped/{self._n}"))
        rewards = [attempt.verdict.reward or 0.0 for attempt in attempts]
        return EvaluationBatch(outputs=rewards, scores=rewards, trajectories=attempts)

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: EvaluationBatch[Attempt, float], components_to_update: list[str]
    ) -> dict[str, list[dict[str, Any]]]:
        """See gepa's GEPAAdapter."""
        records: list[dict[str, Any]] = []
        for attempt in eval_batch.trajectories or []:
            feedback = described(evidence_of(attempt, self._components)) or "It succeeded."
            answer = attempt.trace.answer or ""
            records.append({"Inputs": attempt.task.instruction, "Generated Outputs": answer, "Feedback": feedback})
        return dict.fromkeys(components_to_update, records)


async def untried(*_: object) -> Repair:
    """In place of `repair.repair`: no step is tried."""
    return Repair(0, [])


def outcome_of(attempt: Attempt, side: Side, trial: int) -> Outcome:
    """An attempt as the gate sees it."""
    reward = attempt.verdict.reward
    state = RewardState.scored if reward is not None else RewardState.infra_failed
    return Outcome(task_id=attempt.task.id, policy=side, trial=trial, reward=reward, state=state)


def row_of(seed: int) -> Row:
    """Everything about one world."""
    with asyncio.Runner() as runner:
        bench = Bench(seed, runner)
        turn, _, _ = bench.turn()
        before = bench.truth(Overlay())
        verdict, n_gate = bench.gate(turn.overlay)
        reported = bench.afresh(turn.overlay) - bench.afresh(Overlay())
        with patch.object(search, "repair", untried):
            unforked, _, _ = bench.turn()
        rewards, _, _ = bench.turn(labels=False)
        lossy, experience, draft = bench.turn(share_lost=LOST)
        unrewarded = {one.trace.id for one in experience.done.values() if one.verdict.reward is None}
        gepa_gain, gepa_reported = bench.as_shipped(turn.n_calls)
        chosen = turn.figures.get("validation_after", 0.0) - turn.figures.get("validation_before", 0.0)
        return Row(
            seed=seed,
            n_conventions=len(bench.world.conventions),
            before=before,
            after=before + turn.gain,
            promoted=verdict is GateVerdict.passed,
            n_search=int(turn.figures["n_attempts"]),
            n_gate=n_gate,
            n_forks=int(turn.figures["n_forks"]),
            n_saved=int(turn.figures["n_attempts_saved"]),
            n_unforked=int(unforked.figures["n_attempts"]),
            unforked_per_1000=unforked.per_1000,
            reported_bias=reported - turn.gain,
            chosen_bias=chosen - turn.gain,
            per_1000=turn.per_1000,
            gain_rewards=rewards.gain,
            gain_lossy=lossy.gain,
            n_lost=int(lossy.figures["n_lost"]),
            n_made_up=sum(trace in unrewarded for trace, _ in draft.pairs),
            gepa_gain=gepa_gain,
            gepa_per_1000=1000 * gepa_gain / max(1, turn.n_calls),
            gepa_bias=gepa_reported - gepa_gain,
        )


def seeds_of(commit: str, n: int) -> list[int]:
    """Words of SHA-256 of a commit; further words are of the commit with a number."""
    digests = [hashlib.sha256(f"{commit}{block or ''}".encode()).hexdigest() for block in range(-(-n // 8))]
    words = [digest[start : start + 8] for digest in digests for start in range(0, 64, 8)]
    return [int(word, 16) for word in words[:n]]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95% interval of a mean."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = float(student.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def goals(rows: Sequence[Row]) -> dict[str, bool]:
    """Goal -> whether it is met. Those that speak of 20 worlds are scaled to as many as there are."""
    enough = math.ceil(0.95 * len(rows))
    good = [row for row in rows if row.promoted and row.before <= 0.35 and row.after >= 0.85]
    return {
        "<= .35 -> >= .85, promoted in 19 of 20": len(good) >= enough,
        "400 attempts of search, 600 of the gate": all(r.n_search <= MAX_SEARCH and r.n_gate <= MAX_GATE for r in rows),
        "more than with rewards alone": interval([row.gain - row.gain_rewards for row in rows])[0] > 0,
        "20% lost: within 3 points": abs(fmean(row.gain - row.gain_lossy for row in rows)) <= 0.03,
        "no lost attempt becomes a number": not any(row.n_made_up for row in rows),
        "gain per 1,000 calls at least gepa's": fmean(r.per_1000 - r.gepa_per_1000 for r in rows) >= 0,
        "reported - true within 1 point": abs(fmean(row.reported_bias for row in rows)) <= 0.01,
    }


def show(rows: Sequence[Row]) -> None:
    """The table."""
    heads = ("world", "n", "before", "after", "gate", "search", "+gate", "rewards", "20%lost", "gepa")
    biases = ("reported", "chosen", "gepa's")
    print("true success, what the gate says, attempts; true gains of the others; bias: number minus true gain")
    print("{:>10} {:>2} {:>7} {:>6} {:>5} {:>7} {:>6} {:>8} {:>8} {:>7} |".format(*heads), *biases)
    for row in rows:
        promoted = "PASS" if row.promoted else "hold"
        print(
            f"{row.seed:10d} {row.n_conventions:2d} {row.before:7.3f} {row.after:6.3f} {promoted:>5} "
            f"{row.n_search:7d} {row.n_gate:6d} {row.gain_rewards:+8.3f} {row.gain_lossy:+8.3f} {row.gepa_gain:+7.3f} "
            f"| {row.reported_bias:+8.3f} {row.chosen_bias:+6.3f} {row.gepa_bias:+6.3f}"
        )
    more = [row.gain - row.gain_rewards for row in rows]
    low, high = interval(more)
    mean = {name: fmean(getattr(row, name) for row in rows) for name in (*Row.__annotations__, "gain")}
    print(
        f"gain {mean['gain']:+.3f}; more than with rewards alone {fmean(more):+.3f} ({low:+.3f} to {high:+.3f}); "
        f"with 20% lost {mean['gain_lossy']:+.3f}; gepa {mean['gepa_gain']:+.3f}"
    )
    print(
        f"gain per 1,000 calls {mean['per_1000']:+.3f}, gepa's {mean['gepa_per_1000']:+.3f}; "
        f"bias {mean['reported_bias']:+.3f}, of the choosing number {mean['chosen_bias']:+.3f}, "
        f"gepa's {mean['gepa_bias']:+.3f}"
    )
    n_forks = sum(row.n_forks for row in rows)
    n_saved = sum(row.n_saved for row in rows)
    print(
        f"{n_forks} single steps from recorded attempts saved {n_saved} full ones; attempts of a search "
        f"{mean['n_search']:.0f}, without such steps {mean['n_unforked']:.0f} (gain per 1,000 calls "
        f"{mean['unforked_per_1000']:+.3f})"
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=20)
    parser.add_argument("--commit", help="default: of this checkout")
    options = parser.parse_args()
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = options.commit or subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    print(f"commit {commit}", flush=True)
    started = time.process_time()
    rows = [row_of(seed) for seed in seeds_of(commit, options.worlds)]
    show(rows)
    met = goals(rows)
    for goal, is_met in met.items():
        print(f"{'met   ' if is_met else 'MISSED'}  {goal}")
    cpu_s = round(time.process_time() - started, 1)
    print(json.dumps({"commit": commit, "cpu_s": cpu_s, "goals": met, "worlds": [asdict(row) for row in rows]}))
    sys.exit(not all(met.values()))


if __name__ == "__main__":
    main()
