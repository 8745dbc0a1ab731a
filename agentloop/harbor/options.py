"""From a user's options to the agent that works on Harbor tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from agentloop.agents.choose import choose_agent
from agentloop.config.sections import AgentSection, PolicySection, from_environment
from agentloop.config.settings import load_agent, load_prices
from agentloop.errors import ConfigError
from agentloop.harbor.agents import Nobody, Oracle, PolicyAgent
from agentloop.harbor.trial import TrialAgent
from agentloop.policies.choose import choose_endpoint
from agentloop.rollout.actors import NOBODY, ORACLE

COMMAND, TOOL_LOOP = "command", "tool_loop"


@dataclass(frozen=True)
class AgentOptions:
    """Who works on the tasks. What is None comes from the settings of the current folder, then from the defaults."""

    agent: str | None
    """`oracle`, `nop`, `tool_loop` or `command`."""
    policy: str
    """Kind of endpoint: `openai`, `vllm` or `litellm`."""
    base_url: str | None
    model: str | None
    command: str | None
    files: Path | None
    """Folder with the program of `command`."""
    tools: Sequence[str] | None
    mcp: Sequence[str]
    """`NAME=COMMAND` in the sandbox, or `NAME=URL`."""
    compaction: str | None

    def make(self) -> TrialAgent:
        """Raises ConfigError for options that do not go together."""
        settings = self._settings()
        kind = self.agent or settings.kind
        if kind == ORACLE:
            return Oracle()
        if kind == NOBODY:
            return Nobody()
        if not self.model or (self.base_url is None and self.policy != "litellm"):
            needed = "--model" if self.policy == "litellm" else "--base-url and --model"
            raise ConfigError(f"--agent {kind} needs {needed}; or use --agent oracle, or nop")
        key = from_environment("${AGENTLOOP_POLICY__API_KEY:-}")
        endpoint = PolicySection.model_validate(
            {"kind": self.policy, "base_url": self.base_url, "model": self.model}
        ).model_copy(update={"api_key": SecretStr(key) if key else None})
        return PolicyAgent(choose_endpoint(endpoint, load_prices(Path())), choose_agent(settings))

    def _settings(self) -> AgentSection:
        """The options before the settings of this folder before the defaults."""
        before = load_agent(Path(), {})
        kind = self.agent or before.kind
        has_program = bool(self.command or before.command)
        if not has_program if kind == COMMAND else bool(self.command or self.files):
            raise ConfigError("--agent command and --command belong together; give both, or neither")
        options: dict[str, Any] = {
            "tools": self.tools,
            "mcp": [_server(text) for text in self.mcp],
            "compaction": self.compaction,
            "command": self.command,
            "files": self.files and self.files.resolve(),
        }
        chosen = {key: value for key, value in options.items() if value}
        if kind == COMMAND and before.kind != kind:  # which has no use for the tools of another kind
            chosen = {"kind": kind, "tools": ("shell",), "mcp": (), "compaction": "none", **chosen}
        elif kind != before.kind:
            chosen |= {"kind": TOOL_LOOP, "command": None, "files": None}
        return load_agent(Path(), chosen)


def _server(text: str) -> dict[str, str | None]:
    name, _, where = text.partition("=")
    is_url = where.startswith(("http://", "https://"))
    return {"name": name, "url" if is_url else "command": where or None}
