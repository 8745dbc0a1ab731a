"""Coding agents that others ship, as kinds of `[agent]`: the right line and variables for `command.Command`.

    npm install --prefix claude @anthropic-ai/claude-code        # or @openai/codex, opencode-ai

    [agent]
    kind = "claude-code"                                         # or "codex", "opencode"
    files = "claude"

The program runs in the sandbox with its own permission prompts off, because the sandbox is what holds it. It asks the
gateway alone: no update, no telemetry, no account. Without `files` the image must have the program on its PATH, and
where npm installed a wrapper, node. What each was tried with: `tests/agents/test_presets.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from agentloop.agents.command import Command

HOME = "/tmp/home"  # noqa: S108 - the sandbox's own
FIND = f"export HOME={HOME} PATH=/agent/node_modules/.bin:$PATH; mkdir -p $HOME; "
"""Where the programs look for settings that they do not have, and where they are."""
PROMPT = '< "$AGENTLOOP_INSTRUCTION_FILE"'


class Preset(Command):
    """`Command` with the line of one program."""

    line: ClassVar[str]
    """Without the instruction, which it reads from its input."""
    variables: ClassVar[Mapping[str, str]]

    def __init__(
        self,
        *,
        files: Path | None = None,
        arguments: str = "",
        timeout_s: float = 3600.0,
        answer_file: str | None = None,
    ) -> None:
        """files: the folder that npm installed to. arguments: more words for the program's command line, for `sh`."""
        command = f"{FIND}{self.line} {arguments} {PROMPT}"
        super().__init__(command, files=files, answer_file=answer_file, env=self.variables, timeout_s=timeout_s)


class ClaudeCode(Preset):
    """Claude Code, by the messages dialect."""

    name = "claude-code"
    line = 'claude --print --model "$AGENTLOOP_MODEL" --dangerously-skip-permissions'
    variables: ClassVar = {
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",  # without it the program refuses to skip permissions as root
    }


class Codex(Preset):
    """Codex, by the responses dialect. Its provider is given on the command line: it takes no base URL by variable."""

    name = "codex"
    line = (
        'codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --model "$AGENTLOOP_MODEL" '
        "--config model_provider=agentloop --config model_providers.agentloop.name=agentloop "
        '--config model_providers.agentloop.base_url="$OPENAI_BASE_URL" '
        "--config model_providers.agentloop.env_key=OPENAI_API_KEY "
        "--config model_providers.agentloop.wire_api=responses "
        # Tools of the provider's own, for which other models have no form.
        "--config web_search=disabled --disable multi_agent"
    )
    variables: ClassVar = {"CODEX_HOME": HOME}


class OpenCode(Preset):
    """opencode, by the chat dialect. Its model is called `agentloop/policy`; the gateway's answers whatever name."""

    name = "opencode"
    line = "opencode run --model agentloop/policy"
    variables: ClassVar = {
        "OPENCODE_CONFIG_CONTENT": json.dumps(
            {
                "autoupdate": False,
                "share": "disabled",
                "permission": {"edit": "allow", "bash": "allow", "webfetch": "deny"},
                "provider": {
                    "agentloop": {
                        "npm": "@ai-sdk/openai-compatible",
                        "name": "agentloop",
                        "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
                        "models": {"policy": {"name": "policy"}},
                    }
                },
            }
        ),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }
