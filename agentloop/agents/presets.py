"""Coding agents of other vendors as kinds of `[agent]`: the command line and variables for `command.Command`.

    npm install --prefix claude @anthropic-ai/claude-code        # or @openai/codex, opencode-ai

    [agent]
    kind = "claude-code"                                         # or "codex", "opencode"
    files = "claude"

The program runs in the sandbox with its own permission prompts off, because the sandbox confines it. It reaches only
the gateway: no updates, no telemetry, no account. Without `files`, the image must have the program on its PATH, and
node if npm installed a wrapper. `tests/agents/test_presets.py` names the tested versions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from agentloop.agents.command import Command

HOME = "/tmp/home"  # noqa: S108 - the sandbox's own
FIND = f"export HOME={HOME} PATH=/agent/node_modules/.bin:$PATH; mkdir -p $HOME; "
"""Shell text that sets the programs' home folder, which has no settings, and their PATH."""
PROMPT = '< "$AGENTLOOP_INSTRUCTION_FILE"'


class Preset(Command):
    """`Command` with the command line of one program."""

    line: ClassVar[str]
    """The command line without the instruction, which the program reads from stdin."""
    variables: ClassVar[Mapping[str, str]]

    def __init__(
        self,
        *,
        files: Path | None = None,
        arguments: str = "",
        timeout_s: float = 3600.0,
        answer_file: str | None = None,
    ) -> None:
        """files: the folder with the npm installation. arguments: further arguments of the program, in shell syntax."""
        command = f"{FIND}{self.line} {arguments} {PROMPT}"
        super().__init__(command, files=files, answer_file=answer_file, env=self.variables, timeout_s=timeout_s)


class ClaudeCode(Preset):
    """Claude Code, through the messages dialect."""

    name = "claude-code"
    line = 'claude --print --model "$AGENTLOOP_MODEL" --dangerously-skip-permissions'
    variables: ClassVar = {
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",  # without it the program refuses to skip permissions as root
    }


class Codex(Preset):
    """Codex, through the responses dialect. Its provider is set on the command line, because it reads no base URL
    variable."""

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
    """opencode, through the chat dialect. Its model is called `agentloop/policy`; the gateway accepts any name."""

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
