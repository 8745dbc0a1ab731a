"""Comparisons of a project, in their order -> the risk that the next one may take of a false promotion.

The probability that a project ever promotes a candidate by a gate whose claim does not hold (one that is no better than
the version live at that time; or, by the claim `not_worse`, one that is worse by delta) is at most alpha, however many
candidates it makes and however often somebody gates them. Comparison k may take

    alpha_k = alpha * 6 / (pi^2 k^2)  +  alpha_(k-1), if comparison k-1 promoted its candidate

Source: Tian & Ramdas, Online control of the familywise error rate, Stat. Methods Med. Res. 30 (2021), online fallback.

Why it holds, with held-out tasks that every candidate is compared on:

- One comparison errs with probability alpha_k at most. Its evidence is an e-process (`eprocess.py`), so the loop may
  stop as soon as it knows. The expected difference is 0 or less for a candidate that is no better: its attempts are
  new, and those of the live version (its bank) say nothing of them.
- A trainer never sees a held-out task or an outcome on one, only that its last candidate was held. So as long as
  candidates are held, which candidates follow does not depend on the bank, and each has its alpha_k whatever the others
  did with the same bank (the union bound needs no independence). The held-out tasks may be used again for this reason,
  and for no other: a trainer that sees them breaks it.
- A promotion chose the candidate by its attempts. They are therefore not its bank: a promoted version is measured
  again, and the next comparison rests on that measurement.
- Sum what the candidates that are no better may take, up to the first that is promoted. Each takes its own share, and
  the shares of the promoted candidates right before it, all of which were better; no share is counted twice. The shares
  sum to alpha.

Gates by hand are in the same row of numbers as the loop's comparisons (`risk_shares.py`). Each has its number, and with
it its alpha_k, in the store before its first attempt, so a gate that was ended, forgotten or repeated has used up its
share: the sum above is over all that began, not over those that ended well. A gate whose evidence goes on keeps its
number. A proof without a number does not promote. Two comparisons at once have two numbers, and the second gets nothing
from the first.

Canaries share `[canary] alpha` by the same rule, numbered by the moves that began them, so all promotions of a project
are wrong with probability `[gate] alpha` + `[canary] alpha` at most. An override and a rollback claim nothing, and are
not in the sum. Neither is somebody who deletes the store, or who writes a candidate with the held-out tasks in view.

"Better" is about the mean over the suite's held-out tasks, in the order of `schedule.py`. Its rounds visit each task
equally often; the statement is exact for a candidate that does no task better, and for `iid` sampling in general.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class AlphaSpent(NamedTuple):
    """One decision."""

    alpha: float
    """The risk that it took."""
    is_promotion: bool


def share(k: int) -> float:
    """Share of alpha for candidate k, from 1 on; the shares of all candidates sum to 1."""
    # The sum of 1 / k^2 over all k is pi^2 / 6.
    return 6 / (math.pi * k) ** 2


def next_alpha(decisions: Sequence[AlphaSpent], alpha: float) -> float:
    """The risk of the next candidate. decisions: all of the project so far, in their order; alpha: over its life."""
    carried = 0.0
    if decisions and decisions[-1].is_promotion:
        carried = decisions[-1].alpha
    return share(len(decisions) + 1) * alpha + carried
