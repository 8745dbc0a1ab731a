"""From `[agent]` of the settings to the agent."""

from __future__ import annotations

from pathlib import Path

from agentloop.agents.compaction import COMPACTIONS
from agentloop.agents.mcp import Mcp
from agentloop.agents.tool_loop import ToolLoop
from agentloop.agents.tools import Submit
from agentloop.agents.toolset import Toolset
from agentloop.plugins import load_part
from agentloop.sections import AgentSection


def choose_agent(settings: AgentSection, base: Path | None = None) -> ToolLoop:
    """The reference agent with the tools that were chosen.

    base: folder that `file.py:Class` starts from. Raises PluginError for tools that are not there.
    """
    named = [name for name in settings.tools if name != Submit.name]
    toolsets: list[Toolset] = [load_part("tools", name, base=base) for name in named]
    for server in settings.mcp:
        headers = {name: value.get_secret_value() for name, value in server.headers.items()}
        toolsets.append(Mcp(server.name, command=server.command, url=server.url, headers=headers))
    return ToolLoop((*toolsets, Submit()), COMPACTIONS[settings.compaction]())
