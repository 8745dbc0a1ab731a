"""Each verifier on the gold answer, a wrong one, an empty one, and ones that try to cheat."""

from __future__ import annotations

import asyncio
import math

import pytest

from agentloop.judge.verifiers.exact import Exact
from agentloop.judge.verifiers.numeric import Numeric
from agentloop.protocols import Verifier
from agentloop.types import StopReason

from .scenes import REFERENCE, shell, trace


def value(verifier: Verifier, answer: str | None) -> float:
    """The score of a submission; the right value was printed in the box, which must not count."""
    stop = StopReason.step_limit if answer is None else StopReason.submitted
    seen = trace([shell(REFERENCE, "95")], stop_reason=stop).model_copy(update={"answer": answer})
    return asyncio.run(verifier.score(seen, None))


@pytest.mark.parametrize("answer", ["95", " 95", "95\n", "\t95 \r\n"])
def test_exact_accepts_the_gold_answer(answer: str) -> None:
    assert value(Exact("95"), answer) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "",
        " ",
        "59",
        "9 5",
        "95.0",
        "095",
        "+95",
        "The answer is 95",
        "94 or 95",
        "95\n59",
        "９５",  # full-width digits
        "٩٥",  # Arabic-Indic digits
        "9\u200b5",
        "95\x00",
        "nan",
        "None",
        ".*",
    ],
)
def test_exact_refuses_everything_else(answer: str | None) -> None:
    assert value(Exact("95"), answer) == 0.0


def test_exact_is_case_sensitive_and_trims_what_is_expected() -> None:
    assert value(Exact("N'Djamena\n"), "N'Djamena") == 1.0
    assert value(Exact("N'Djamena"), "n'djamena") == 0.0


def test_exact_gives_nothing_for_no_submission_even_when_nothing_is_expected() -> None:
    assert value(Exact(""), None) == 0.0


@pytest.mark.parametrize("answer", ["95", "95.0", "9.5e1", "+95", " 95\n", "950E-1", "95."])
def test_numeric_accepts_every_spelling_of_the_number(answer: str) -> None:
    assert value(Numeric(95), answer) == 1.0


@pytest.mark.parametrize(
    "answer",
    [None, "", ".", "-", "e5", "nan", "inf", "-inf", "infinity", "1e999", "9_5", "９５", "0x5f", "95 96", "95%", "=95"],
)
def test_numeric_refuses_what_is_not_one_finite_number(answer: str | None) -> None:
    assert value(Numeric(95, tolerance=1e300), answer) == 0.0


def test_numeric_tolerance_is_absolute_and_inclusive() -> None:
    assert [value(Numeric(2.0, 0.5), text) for text in ("1.5", "2.5", "1.4", "2.6")] == [1.0, 1.0, 0.0, 0.0]
    assert value(Numeric(2.0), "2.0000001") == 0.0


@pytest.mark.parametrize(
    ("expected", "tolerance"), [(math.nan, 0.0), (math.inf, 0.0), (1.0, -0.1), (1.0, math.nan), (1.0, math.inf)]
)
def test_numeric_refuses_bounds_that_mean_nothing(expected: float, tolerance: float) -> None:
    with pytest.raises(ValueError, match="numeric: "):
        Numeric(expected, tolerance)
