"""Agents with SDKs behind the gateway: an overlay improves them, and no line of theirs changes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from environments import python_with
from parts import need_ports

from agentloop.types import Component, Lesson, Overlay
from benchmarks.overlay_agents import drive, questions, success
from tests.gateway.test_clients import LANGGRAPH

pytestmark = pytest.mark.slow

STYLE = Component(
    name="instructions.style", original="Be friendly and write whole sentences.", text="Answer with the number alone."
)
SINGULAR = Component(
    name="tool.count",
    original="How many animals of a kind the zoo has.",
    text="How many animals of a kind the zoo has. Name the kind by its singular, in lower case.",
)
PAIRS = Lesson(applies_to="questions about pairs", text="A pair is two animals: divide the count by two.")
OVERLAY = Overlay(components=(STYLE, SINGULAR), lessons=(PAIRS,))


def check(agent: str, python: str) -> None:
    asked = questions(20)
    before = drive(agent, python, asked)
    after = drive(agent, python, asked, OVERLAY)
    assert (before.n_without_text, after.n_without_text) == (0, 0)
    assert success(before, asked) == pytest.approx(0.4, abs=0.1)
    assert success(after, asked) >= 0.85


@pytest.mark.parametrize("agent", ["openai_chat", "anthropic_messages"])
def test_an_agent_with_an_sdk(agent: str) -> None:
    need_ports()
    check(agent, sys.executable)


@pytest.mark.soak  # it is installed from the index
def test_an_agent_with_langgraph() -> None:
    check("langgraph_graph", str(Path(python_with(LANGGRAPH))))
