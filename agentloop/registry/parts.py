"""What a version consists of: everything that decides how an agent acts, as parts for `identity.py`.

One notion for all: `agentloop loop` makes another version, and `gate`, `bank` and recordings see another policy,
exactly when this identity changes. It covers the settings of `[policy]` and `[agent]`, the files that they name by
contents, and the weights of a policy of ours. It does not cover paths, keys, prices, limits (which belong to the suite)
or the number of concurrent episodes.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from agentloop.config.kinds import KindSection
from agentloop.config.sections import AgentSection, PolicySection
from agentloop.identity import FileContents, Outside, Part, Value
from agentloop.options import code_options, interpreter_options, path_options
from agentloop.policies.endpoints import ENDPOINTS
from agentloop.source import program, source
from agentloop.types import Task

VERSION_S = 30.0
"""Wall time in which an interpreter reports its version."""


def policy_parts(settings: PolicySection, folder: Path) -> dict[str, Part]:
    """Parts of a policy, without the weights or recorded answers that it plays. folder: where its paths start."""
    if not settings.is_built_in:
        model = Outside(None, f"what the policy {settings.kind!r} asks")
        return {**_foreign("policies", "policy", settings, folder), "policy.model": model}
    chosen = settings.model_dump(mode="json", include={"temperature"}, exclude_defaults=True)
    parts: dict[str, Part] = {"policy": Value({"kind": settings.kind, **chosen})}
    if settings.kind in ENDPOINTS:
        name = {"base_url": settings.base_url, "model": settings.model}
        where = f" at {settings.base_url}" if settings.base_url else ""
        parts["policy.model"] = Outside(name, f"the model {settings.model!r}{where}")
    if settings.kind == "scripted" and settings.script is not None:
        parts |= _named("policy.script", source("policies", settings.script, folder))
    return parts


def agent_parts(settings: AgentSection, folder: Path, tasks: Sequence[Task]) -> dict[str, Part]:
    """Parts of the agent. folder: where its paths start. Empty for `tasks` that are played in an environment."""
    if tasks and tasks[0].environment is not None:
        return {}
    if not settings.is_built_in:
        return _foreign("agents", "agent", settings, folder)
    chosen = settings.model_dump(
        mode="json",
        exclude={"files": True, "instructions": True, "tools": True, "mcp": {"__all__": {"headers"}}},
        exclude_defaults=True,
    )
    parts: dict[str, Part] = {"agent": Value(chosen)}
    if settings.kind == "tool_loop":
        parts["agent.tools"] = Value([tool.rpartition(":")[2] for tool in settings.tools])
        for n, tool in enumerate(settings.tools):
            parts |= _named(f"agent.tools.{n}", source("tools", tool, folder))
    if settings.instructions is not None:
        parts["agent.instructions"] = FileContents(folder / settings.instructions, follow=True)
    if settings.files is not None:
        parts["agent.files"] = FileContents(folder / settings.files)
    elif settings.command is not None:
        parts["agent.program"] = Outside(None, "the program of [agent] command, which names no files")
    for server in settings.mcp:
        if server.url is not None:
            parts[f"agent.mcp.{server.name}"] = Outside(None, f"the MCP server {server.name!r} at {server.url}")
        elif settings.files is None:
            label = f"the MCP server {server.name!r}, whose command has no [agent] files"
            parts[f"agent.mcp.{server.name}"] = Outside(None, label)
    return parts


def _foreign(group: str, table: str, settings: KindSection, folder: Path) -> dict[str, Part]:
    """Parts of a kind that is not built in: its code, its options, and the files and code that they name."""
    name = {} if ":" in settings.kind else {"kind": settings.kind}
    paths = path_options(group, table, settings, folder)
    interpreters = interpreter_options(group, table, settings, folder)
    plain = {key: value for key, value in settings.public_options.items() if key not in {*paths, *interpreters}}
    parts: dict[str, Part] = {table: Value({**name, **plain})}
    for key, path in interpreters.items():
        parts[f"{table}.{key}"] = FileContents(path.resolve())
        parts[f"{table}.{key}.version"] = Value(_version(path))
    parts |= _named(f"{table}.part", source(group, settings.kind, folder))
    for key, code in code_options(group, table, settings, folder).items():
        parts |= _named(f"{table}.{key}", program(code, folder))
    return parts | {f"{table}.{key}": FileContents(path) for key, path in paths.items() if path.exists()}


def _version(interpreter: Path) -> str:
    """`Python 3.12.4`; nothing for a program that does not tell."""
    try:
        done = subprocess.run(
            [interpreter, "--version"], capture_output=True, text=True, timeout=VERSION_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _named(prefix: str, parts: dict[str, Part]) -> dict[str, Part]:
    return {f"{prefix}.{name}": part for name, part in parts.items()}
