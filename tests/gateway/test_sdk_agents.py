"""Agents with SDKs behind the gateway: an overlay improves them, and no line of theirs changes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from environments import python_with

from benchmarks.overlay_agents import questions, success
from tests.gateway.test_clients import LANGGRAPH


def check(agent: str, python: str) -> None:
    asked = questions(20)
    before, n_wrong = success(agent, python, asked, 1)
    after, n_wrong_after = success(agent, python, asked, 2)
    assert (before, n_wrong, n_wrong_after) == (pytest.approx(0.4, abs=0.1), 0, 0)
    assert after >= 0.85


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["openai_chat", "anthropic_messages"])
def test_an_agent_with_an_sdk(agent: str) -> None:
    check(agent, sys.executable)


@pytest.mark.soak  # it is installed from the index
@pytest.mark.slow
def test_an_agent_with_langgraph() -> None:
    check("langgraph_graph", str(Path(python_with(LANGGRAPH))))
