"""Which quotes show the place that they are from, in scripts with spaces between words and in those without."""

from __future__ import annotations

import pytest

from agentloop.judge.fence import identifies


@pytest.mark.parametrize(
    ("quote", "text"),
    [
        ("合計は四十二", "計算の結果、合計は四十二です。"),
        ("答案是四十二", "经过计算,答案是四十二。"),
        ("四十二人", "参加者は四十二人です"),
        ("Python", "我们使用Python编程"),
        ("answer 4", "the answer 4 is right, and answer 42 is wrong"),
        ("owls", "two owls sat there"),
        ("совы", "две совы сидели там"),
        ("4", "The total:\n4\nis what remains"),
        ("| 12 h", "12 h\nand more"),
        ("17", '{"answer": "17"}'),
        ("f(x)=1", "it is f(x)=1 here"),
        ("the sum is what was asked", "the sum is what was asked; the sum is what was asked"),
    ],
)
def test_a_quote_that_shows_its_place(quote: str, text: str) -> None:
    assert identifies(quote, text)


@pytest.mark.parametrize(
    ("quote", "text"),
    [
        ("is", "the answer is 4"),
        ("the", "the answer is 4"),
        ("4", "the answer is 4"),
        ("owls", "two owls and three owls"),
        ("owls", "two growls"),
        ("совы", "две основы"),
        ("です", "合計は四十二です。"),
        ("四十二人", "四十二人と四十二人"),
        ("4", "4\n4"),
        ("answer", "answers"),
        ("not there", "the answer is 4"),
        ("", "the answer is 4"),
    ],
)
def test_a_quote_that_does_not(quote: str, text: str) -> None:
    assert not identifies(quote, text)
