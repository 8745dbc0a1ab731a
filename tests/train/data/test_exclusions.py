"""Reasons: each has a remedy, and a line of them."""

from __future__ import annotations

from collections import Counter

from agentloop.train.data.exclusions import Exclusion, exclusions_line


def test_every_reason_has_a_remedy() -> None:
    assert all(reason.remedy for reason in Exclusion)


def test_counts_in_a_line_with_the_remedy_of_the_largest() -> None:
    counts = Counter({"all_failed": 9, Exclusion.unscored: 2, Exclusion.copied: 1, "all_passed": 0})
    assert exclusions_line(counts) == f"9 all_failed, 2 unscored, 1 copied; unscored: {Exclusion.unscored.remedy}"
    assert exclusions_line({}) == ""
