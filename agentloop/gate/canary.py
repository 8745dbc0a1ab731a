"""Episodes of live traffic -> verdict on a canary: each canary reward against those of the live ones around it.

A pure fold over episodes in the order in which they began. An episode counts once its reward has come or has been given
up, and only after every earlier one: the order in which rewards arrive says something about them, the order in which
episodes began does not. A reward that never comes is not imputed. Where one side loses more of them than the other, the
rewards that are there mislead, and the verdict is INFRA. Reads no store and moves no version (`canaries.py`).

A block is one canary episode, the live ones just before it and the first ones after it. No live episode is in two
blocks: if one were, part of the second difference would be known when the bet on it is made.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from agentloop.gate.eprocess import Bets, log_mixture

BEFORE = 8
AFTER = 4
"""Live episodes of a block, at most: before its canary episode, and after it."""
FAMILIAR = 20
"""Episodes of a task after which it is compared with itself alone; rarer tasks are compared with each other."""
ODDS = (50.0, 4.0, 0.25)
"""How much more often the canary's rewards are missing, as the bets on attrition suppose."""
ODDS_WEIGHTS = (0.55, 0.25, 0.2)
ATTRITION = 0.2
"""Share of alpha for INFRA, if rewards go missing alike on both sides. FAIL has the rest."""
DOUBT = 3.0
HIDDEN = 0.2
"""PASS waits while the evidence of unequal attrition is DOUBT : 1 and the canary lacks more rewards than the live side,
by this share of delta: the missing rewards could hide a drop."""


class Arm(StrEnum):
    """Which version an episode had."""

    live = "live"
    canary = "canary"


class LiveEpisode(NamedTuple):
    """One episode of live traffic, as far as its outcome is known."""

    id: str
    began_at: datetime
    arm: Arm
    reward: float | None = None
    """In [0, 1]; None where it has not come."""
    task: str | None = None
    """Named before the first call: a later name could depend on the version."""
    is_lost: bool = False
    """No reward will come: its episode was lost to the infrastructure."""


class CanaryRules(NamedTuple):
    """At which risk, and how long, a canary is judged."""

    delta: float = 0.05
    """Drop of the mean reward that PASS excludes."""
    alpha: float = 0.05
    """Risk of an alarm, FAIL or INFRA, where the canary is no worse and its rewards come as the live ones do. It is the
    risk of a false PASS, too, unless `pass_alpha` is smaller: each of the claims, `not_worse` and `better`, has half of
    it."""
    max_episodes: int = 2500
    """Canary episodes after which an open comparison is INCONCLUSIVE."""
    wait: timedelta = timedelta(hours=24)
    """Time after its beginning at which the reward of an episode is given up."""
    settle: timedelta = timedelta(0)
    """Age from which an episode counts: longer than its first call takes to be recorded."""
    pass_alpha: float | None = None
    """Risk of a false PASS; None: alpha."""


class CanaryVerdict(StrEnum):
    """The end of a comparison."""

    passed = "PASS"
    failed = "FAIL"
    inconclusive = "INCONCLUSIVE"
    infra = "INFRA"


@dataclass
class _Stratum:
    """Episodes that are alike: of one task, or of all tasks that are rare."""

    before: deque[float | None] = field(default_factory=lambda: deque(maxlen=BEFORE))
    """Rewards of live episodes that no block has yet; None where it is missing."""
    n_after: int | None = None
    """Live episodes since the last canary one; None while no block is open."""
    rewards: dict[Arm, list[float]] = field(default_factory=lambda: {arm: [] for arm in Arm})
    """Rewards of the open block, and of earlier blocks in which one side has no reward."""
    n: Counter[Arm] = field(default_factory=Counter)
    """Episodes of the open block, and of those before it that have episodes of one side alone."""
    n_missing: Counter[Arm] = field(default_factory=Counter)

    def take(self, arm: Arm, reward: float | None) -> None:
        """Add an episode to the open block."""
        self.n[arm] += 1
        if reward is None:
            self.n_missing[arm] += 1
        else:
            self.rewards[arm].append(reward)


class Attrition:
    """Evidence that one side's rewards go missing more often than the other's.

    Bets on which episodes of a block are the missing ones, given how many are missing. Were both sides alike, each
    choice would be as likely as any other (hypergeometric), however the share of missing rewards changes with time.
    """

    def __init__(self) -> None:
        self._logs = [math.log(weight) for weight in ODDS_WEIGHTS]
        self.log_e = 0.0

    def add(self, n: Mapping[Arm, int], n_missing: Mapping[Arm, int]) -> None:
        """Settle the bets on one block. n: all of its episodes, by side."""
        n_canary = n[Arm.canary]
        n_live = n[Arm.live]
        k_canary = n_missing[Arm.canary]
        k_all = k_canary + n_missing[Arm.live]
        if not k_all:
            return
        least = max(0, k_all - n_live)
        most = min(n_canary, k_all)
        ways = {k: math.comb(n_canary, k) * math.comb(n_live, k_all - k) for k in range(least, most + 1)}
        n_ways = sum(ways.values())
        for j, odds in enumerate(ODDS):
            total = sum(ways[k] * odds**k for k in ways)
            # Likelihood ratio of Fisher's noncentral hypergeometric distribution to the central one.
            self._logs[j] += math.log(odds**k_canary * n_ways / total)
        self.log_e = log_mixture(self._logs)


class CanaryFold:
    """The evidence so far. `add` takes settled episodes in the order in which they began, until there is a verdict."""

    def __init__(self, rules: CanaryRules) -> None:
        self.rules = rules
        self.bets = Bets(rules.delta, looks=False)
        """On canary minus live."""
        self.better = Bets(rules.delta, looks=False)
        """On live minus canary: its evidence of a drop is that of a rise."""
        self.attrition = Attrition()
        self.differences: list[float] = []
        self.verdict: CanaryVerdict | None = None
        self.n = Counter[Arm]()
        self.n_missing = Counter[Arm]()
        self.totals = dict.fromkeys(Arm, 0.0)
        """Sums of rewards."""
        self.outcomes = hashlib.sha256()
        self._infra_bound = -math.log(ATTRITION * rules.alpha)
        self._fail_bound = -math.log((1 - ATTRITION) * rules.alpha)
        # The claims `not_worse` and `better` have half of the risk each.
        self._claim_bound = math.log(2 / (rules.pass_alpha or rules.alpha))
        self._visits = Counter[str]()
        self._strata: dict[str, _Stratum] = {}

    @property
    def is_better(self) -> bool:
        """The canary is better than the live version."""
        return self.better.log_fail >= self._claim_bound

    @property
    def low(self) -> float:
        """Lower end of the 95% confidence sequence of the difference. Computed on demand, because it is slow."""
        bets = Bets(self.rules.delta)
        for difference in self.differences:
            bets.add(difference)
        assert bets.interval is not None  # noqa: S101  # `looks` is on
        return bets.interval.low

    def add(self, episode: LiveEpisode) -> None:
        """The next episode; one without a reward is missing for good. Raises ValueError after the verdict."""
        if self.verdict is not None:
            raise ValueError(f"the verdict is {self.verdict}; no later episode counts")
        arm = episode.arm
        reward = episode.reward
        # A proof has the hash of everything that counted, in its order.
        self.outcomes.update(f"{episode.id}\t{arm}\t{reward}\n".encode())
        self.n[arm] += 1
        if reward is None:
            self.n_missing[arm] += 1
        else:
            self.totals[arm] += reward
        self._place(self._stratum(episode.task), arm, reward)
        if self.verdict is None and self.n[Arm.canary] >= self.rules.max_episodes:
            self.verdict = CanaryVerdict.inconclusive

    def _stratum(self, task: str | None) -> _Stratum:
        """Decided by earlier episodes alone, whatever their side, so that both sides are sorted alike."""
        name = ""
        if task:
            if self._visits[task] >= FAMILIAR:
                name = task
            self._visits[task] += 1
        return self._strata.setdefault(name, _Stratum())

    def _place(self, stratum: _Stratum, arm: Arm, reward: float | None) -> None:
        if arm is Arm.canary:
            if stratum.n_after is not None:
                self._close(stratum)
            stratum.n_after = 0
            for earlier in stratum.before:
                stratum.take(Arm.live, earlier)
            stratum.before.clear()
            stratum.take(arm, reward)
        elif stratum.n_after is None:
            stratum.before.append(reward)
        else:
            stratum.take(arm, reward)
            stratum.n_after += 1
            if stratum.n_after == AFTER:
                self._close(stratum)

    def _close(self, stratum: _Stratum) -> None:
        stratum.n_after = None
        if stratum.n[Arm.canary] and stratum.n[Arm.live]:
            self.attrition.add(stratum.n, stratum.n_missing)
            stratum.n.clear()
            stratum.n_missing.clear()
        canary = stratum.rewards[Arm.canary]
        live = stratum.rewards[Arm.live]
        if canary and live:
            difference = math.fsum(canary) / len(canary) - math.fsum(live) / len(live)
            canary.clear()
            live.clear()
            self.bets.add(difference)
            self.better.add(-difference)
            self.differences.append(difference)
        if self.verdict is None:
            self._decide()

    def _decide(self) -> None:
        if self.attrition.log_e >= self._infra_bound:
            self.verdict = CanaryVerdict.infra
        elif self.bets.log_fail >= self._fail_bound:
            self.verdict = CanaryVerdict.failed
        elif self.bets.log_pass >= self._claim_bound and not self._may_hide_a_drop():
            self.verdict = CanaryVerdict.passed

    def _may_hide_a_drop(self) -> bool:
        shares = {arm: self.n_missing[arm] / max(1, self.n[arm]) for arm in Arm}
        excess = shares[Arm.canary] - shares[Arm.live]
        return self.attrition.log_e >= math.log(DOUBT) and excess > HIDDEN * self.rules.delta


def fold(episodes: Iterable[LiveEpisode], rules: CanaryRules, now: datetime) -> CanaryFold:
    """The evidence at a time, whatever the order of `episodes`: up to the first one that is still waited for."""
    folded = CanaryFold(rules)
    # The id breaks ties, so that the order does not depend on the store.
    for episode in sorted(episodes, key=lambda each: (each.began_at, each.id)):
        age = now - episode.began_at
        is_waiting = episode.reward is None and not episode.is_lost and age < rules.wait
        # The first episode that waits holds back all later ones: otherwise quick rewards would count first.
        if folded.verdict is not None or is_waiting or age < rules.settle:
            break
        folded.add(episode)
    return folded
