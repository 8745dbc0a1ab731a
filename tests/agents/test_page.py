"""What docs/agents.md shows is what there is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from agentloop.agents.choose import choose_agent
from agentloop.sandbox.bubblewrap import BubblewrapBackend
from agentloop.sections import AgentSection

from .acting import act, asks

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()


def test_its_settings_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TICKETS_TOKEN", "x")
    (settings,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    found = AgentSection.model_validate(tomllib.loads(settings)["agent"])
    assert [server.name for server in found.mcp] == ["time", "tickets"]


def test_its_tool_works(bubblewrap: BubblewrapBackend, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mine.py").write_text(program)
    loop = choose_agent(AgentSection(tools=("shell", "mine.py:Count")), tmp_path)
    write, count = asks("shell", command="echo one two > /work/a"), asks("count", path="/work/a")
    done = act(bubblewrap, loop._toolsets[:-1], write, count, asks("count", path="/work/b"))
    assert done.said[1] == "2"
    assert done.said[2].startswith("failed: /work/b in the box")


def test_its_table_names_every_tool(bubblewrap: BubblewrapBackend) -> None:
    families = re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE, re.MULTILINE)
    for family, tools in families:
        done = act(bubblewrap, choose_agent(AgentSection(tools=(family,)))._toolsets[:-1])
        assert done.player.offered[0] == (*re.findall(r"`(\w+)`", tools), "submit")
    assert {family for family, _ in families} == {"shell", "python", "files", "search", "delegate"}
