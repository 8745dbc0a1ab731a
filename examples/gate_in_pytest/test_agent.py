"""A gate as a test: it fails when a change makes the agent worse.

    pytest test_agent.py

The baseline is measured when its file is missing. In a repository you commit `evals/words/baseline/main.jsonl`, so that
the test compares each change with the agent that you released.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from agent import model, suite, worse

import agentloop as al

BASELINE = Path("evals/words/baseline/main.jsonl")


@pytest.fixture(scope="session", autouse=True)
def baseline() -> None:
    """The bank of the released agent."""
    if not BASELINE.exists():
        al.bank(suite(), al.policy(model), name="main", trials=8)


def test_the_agent_is_no_worse_than_the_released_one() -> None:
    result = al.gate(suite(), baseline="main", candidate=al.policy(model), max_rollouts=12)
    assert result.verdict != "FAIL", result.reasons


def test_a_change_for_the_worse_is_caught() -> None:
    assert al.gate(suite(), baseline="main", candidate=al.policy(worse)).verdict == "FAIL"
