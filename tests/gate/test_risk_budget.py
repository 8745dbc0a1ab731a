"""The risk over a project's life: against the sum of its shares, and by every history of promotions."""

from __future__ import annotations

from itertools import product

import pytest

from agentloop.gate.risk_budget import AlphaSpent, next_alpha, share


def history(promotions: tuple[bool, ...], alpha: float) -> list[AlphaSpent]:
    decisions: list[AlphaSpent] = []
    for is_promotion in promotions:
        decisions.append(AlphaSpent(next_alpha(decisions, alpha), is_promotion))
    return decisions


def test_the_first_candidates_by_hand() -> None:
    alphas = [one.alpha for one in history((False, True, True, False, False), 0.05)]
    own = [0.05 * 6 / 3.141592653589793**2 / k**2 for k in range(1, 6)]
    assert alphas == pytest.approx([own[0], own[1], own[1] + own[2], own[1] + own[2] + own[3], own[4]])


def test_the_shares_sum_to_one() -> None:
    assert 0.9999 < sum(map(share, range(1, 20_000))) < 1


@pytest.mark.parametrize("is_null", list(product((False, True), repeat=6))[1:])
def test_candidates_that_are_no_better_never_take_more_than_alpha(is_null: tuple[bool, ...]) -> None:
    """Whatever happens to the better ones, up to the first false promotion."""
    for promotions in product((False, True), repeat=6):
        if any(null and promoted for null, promoted in zip(is_null, promotions, strict=True)):
            continue  # the first false promotion ends what is counted; the sum up to there is that of another history
        spent = history(promotions, 0.05)
        assert sum(one.alpha for one, null in zip(spent, is_null, strict=True) if null) < 0.05
