"""The end of a run: from where to where, and what was proven."""

from __future__ import annotations

from typing import Any

import pytest
from agentloop_cli.render import print_summary


def version(number: int, decision: str | None, *, live: bool = False) -> dict[str, Any]:
    state = "live" if live else "held"
    found = {"success": 0.5, "ci95": [0.4, 0.6], "p_better": 0.04 if decision else None}
    return {"number": number, "state": state, "decision": decision, **found}


def document(versions: list[dict[str, Any]], n: int = 150, count: int = 2) -> dict[str, Any]:
    return {
        "versions": versions,
        "heldout": {"n": n, "before": {"success": 0.295}, "after": {"success": 0.95}},
        "failures": {"before": {}, "after": {}},
        **dict.fromkeys(("episodes", "tool_calls", "infra_failed", "failed_tasks"), count),
        **dict.fromkeys(("wall_s", "cpu_s"), 1.0),
        "sandbox": "bubblewrap",
        "isolation": "namespaces",
    }


@pytest.mark.parametrize(
    ("versions", "line"),
    [
        (
            [version(1, None, live=True)],
            "95.0% (v1, live) of 150 held-out tasks; nothing was promoted: there is only v1",
        ),
        (
            [version(1, None, live=True), version(2, "hold"), version(3, "roll_back")],
            "95.0% (v1, live) of 150 held-out tasks; nothing was promoted: v2, v3 not shown to be better",
        ),
        (
            [version(1, None), version(2, "promote"), version(3, "promote", live=True), version(4, "hold")],
            "29.5% (v1) -> 95.0% (v3, live) of 150 held-out tasks; the gate promoted v3",
        ),
    ],
    ids=["alone", "nothing promoted", "promoted"],
)
def test_the_outcome_is_one_line_with_what_was_proven(
    capsys: pytest.CaptureFixture[str], versions: list[dict[str, Any]], line: str
) -> None:
    print_summary(document(versions))
    assert line in capsys.readouterr().out.splitlines()


def test_one_of_a_thing_is_not_many(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(document([version(1, None, live=True)], n=1, count=1))
    out = " ".join(capsys.readouterr().out.split())
    assert "of 1 held-out task;" in out
    assert "1 episode and 1 tool call in bubblewrap" in out
    assert "1 infrastructure failure, 1 failed task kept" in out
    assert "1 infrastructure failures" not in out
