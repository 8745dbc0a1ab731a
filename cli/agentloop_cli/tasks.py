"""`agentloop run`: trials of Harbor task folders."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import SecretStr
from rich.table import Table
from rich.text import Text

from agentloop.errors import ConfigError, counted
from agentloop_cli.render import AsJson, LiveProgress, print_json, stderr, stdout

if TYPE_CHECKING:
    from agentloop.config.sections import AgentSection, PolicySection
    from agentloop.harbor.trial import TrialAgent

FAILED_CHECK, INFRASTRUCTURE, INTERRUPTED = 1, 4, 130


class Kind(StrEnum):
    """Who is asked: see `[policy] kind`."""

    openai = "openai"
    vllm = "vllm"
    litellm = "litellm"


class Agent(StrEnum):
    """Who works on the tasks."""

    oracle = "oracle"
    nop = "nop"
    tool_loop = "tool_loop"
    command = "command"


def run(
    folders: Annotated[list[Path], typer.Argument(help="Task folders, or folders that hold them.")],
    agent: Annotated[
        Agent | None,
        typer.Option(
            help="Their own solution, nobody, the reference agent, or a program; default: \\[agent], else tool_loop."
        ),
    ] = None,
    policy: Annotated[
        Kind, typer.Option(help="Who is asked by tool_loop and command: an endpoint, a vLLM server, or by litellm.")
    ] = Kind.openai,
    base_url: Annotated[str | None, typer.Option(help="OpenAI-compatible endpoint; litellm may need none.")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name at that endpoint, or litellm's.")] = None,
    command: Annotated[
        str | None, typer.Option(help="Of the agent's program, for sh in the box; see $AGENTLOOP_INSTRUCTION there.")
    ] = None,
    agent_files: Annotated[
        Path | None, typer.Option(help="Folder with the agent's program, which the boxes show as /agent.")
    ] = None,
    sandbox: Annotated[str, typer.Option(help="auto, docker or bubblewrap.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for the traces.")] = Path("runs"),
    trials: Annotated[int, typer.Option(min=1, max=1000, help="Trials of each task.")] = 1,
    n_concurrent: Annotated[int, typer.Option(min=1, help="Trials at once.")] = 2,
    canaries: Annotated[
        bool, typer.Option(help="Plant a decoy answer, test and credential in /var/lib/grader.")
    ] = True,
    tool: Annotated[
        list[str] | None, typer.Option(help="Tools of tool_loop: shell, python, files, ...; may be given repeatedly.")
    ] = None,
    mcp: Annotated[
        list[str] | None, typer.Option(help="NAME=COMMAND in the box, or NAME=URL: an MCP server's tools; repeatedly.")
    ] = None,
    compaction: Annotated[str | None, typer.Option(help="When the context is full: none, drop, summarise.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run Harbor tasks: an agent works in a box of the task's image, the task's tests score it.

    A task is a folder with task.toml, instruction.md, tests/test.sh and
    environment/Dockerfile. The default agent needs --base-url and --model,
    and its key, if any, in AGENTLOOP_POLICY__API_KEY. What else it works with,
    the table `agent` of agentloop.toml in this folder says, or the options;
    what a model costs, its tables `prices`.
    --agent command takes the same, and is any program that asks a model by
    OPENAI_BASE_URL or ANTHROPIC_BASE_URL: it runs in the box, and has no
    other network than the task allows.

    Exit codes: 0 all scored, 1 the oracle failed a task, 2 a task is wrong,
    4 a trial gave no reward, 130 interrupted.
    """
    from agentloop.config.sections import PolicySection
    from agentloop.config.settings import STORE, known_secrets
    from agentloop.harbor.run import document, refuse_images, run_tasks
    from agentloop.harbor.task import find_tasks
    from agentloop.sandbox.ladder import make_backend
    from agentloop.store.store import Store

    tasks = find_tasks(folders)
    settings = _settings(agent, command, agent_files, tool, mcp, compaction)
    agent = agent or Agent(settings.kind)
    chosen = _agent(agent, settings, PolicySection(kind=policy.value, base_url=base_url, model=model))
    for remark in (remark for task in tasks for remark in task.remarks):
        stderr.print(f"note: {remark}", markup=False)
    backend = make_backend(sandbox, "--sandbox")
    refuse_images(tasks, backend)
    try:
        (out / STORE).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: no folder can be made there ({error.strerror}); name another") from None
    store = Store(out / STORE, secrets=known_secrets(Path()))
    try:
        with store.lock(), LiveProgress() as progress:
            progress.start(f"run: {agent.value} on {counted(len(tasks), 'task')}", len(tasks) * trials)
            done = asyncio.run(
                run_tasks(
                    tasks,
                    chosen,
                    backend,
                    store,
                    n_concurrent=n_concurrent,
                    n_trials=trials,
                    planted=canaries,
                    on_done=lambda _: progress.advance(),
                )
            )
    except KeyboardInterrupt:
        stderr.print(
            f"interrupted; trials that had ended are kept in {out}, and the same command starts anew", markup=False
        )
        raise typer.Exit(INTERRUPTED) from None
    finally:
        store.close()
    found = document(done, agent.value, backend.name, out / STORE)
    if as_json:
        print_json(found)
    else:
        _show(found, out)
    if found["n_scored"] < found["n_trials"]:
        raise typer.Exit(INFRASTRUCTURE)
    if agent is Agent.oracle and any(trial["reward"] < 1.0 for trial in found["trials"]):
        raise typer.Exit(FAILED_CHECK)


def _settings(
    agent: Agent | None,
    command: str | None,
    files: Path | None,
    tool: list[str] | None,
    mcp: list[str] | None,
    compaction: str | None,
) -> AgentSection:
    """The options before the settings of this folder before the defaults."""
    from agentloop.config.settings import load_agent

    was = load_agent(Path(), {})
    kind = agent.value if agent else was.kind
    if not (command or was.command) if kind == Agent.command else bool(command or files):
        raise ConfigError("--agent command and --command belong together; give both, or neither")
    servers = []
    for given in mcp or ():
        name, _, where = given.partition("=")
        servers.append({"name": name, "url" if where.startswith(("http://", "https://")) else "command": where or None})
    options: dict[str, Any] = {"tools": tool, "mcp": servers, "compaction": compaction}
    options |= {"command": command, "files": files and files.resolve()}
    chosen = {key: value for key, value in options.items() if value}
    if kind == Agent.command and was.kind != kind:  # which has no use for the tools of another kind
        chosen = {"kind": kind, "tools": ("shell",), "mcp": (), "compaction": "none", **chosen}
    elif kind != was.kind:
        chosen |= {"kind": "tool_loop", "command": None, "files": None}
    return load_agent(Path(), chosen)


def _agent(agent: Agent, settings: AgentSection, asked: PolicySection) -> TrialAgent:
    from agentloop.harbor.agents import Nobody, Oracle, PolicyAgent

    if agent is Agent.oracle:
        return Oracle()
    if agent is Agent.nop:
        return Nobody()
    if not asked.model or (asked.base_url is None and asked.kind != Kind.litellm):
        needed = "--model" if asked.kind == Kind.litellm else "--base-url and --model"
        raise ConfigError(f"--agent {agent.value} needs {needed}; or use --agent oracle, or nop")
    from agentloop.agents.choose import choose_agent
    from agentloop.config.sections import from_environment
    from agentloop.config.settings import load_prices
    from agentloop.policies.choose import choose_endpoint

    key = from_environment("${AGENTLOOP_POLICY__API_KEY:-}")
    asked = asked.model_copy(update={"api_key": SecretStr(key) if key else None})
    return PolicyAgent(choose_endpoint(asked, load_prices(Path())), choose_agent(settings))


def _show(found: Mapping[str, Any], out: Path) -> None:
    many = found["n_trials"] > found["n_tasks"]
    table = Table(box=None, pad_edge=False)
    for heading in ("task", "reward", *(["each"] if many else []), "time", "why"):
        table.add_column(heading, justify="right" if heading in {"reward", "time"} else "left", overflow="fold")
    for task in found["tasks"]:
        trials = [trial for trial in found["trials"] if trial["task"] == task["task"]]
        reward, time_s = task["mean_reward"], sum(trial["duration_s"] for trial in trials) / len(trials)
        shown = (
            Text(trials[0]["state"], "yellow")
            if reward is None
            else Text(f"{reward:.3g}", "green" if reward >= 1 else "red")
        )
        each = " ".join("-" if each is None else f"{each:.3g}" for each in task["rewards"])
        why = next((trial["why"] for trial in trials if trial["why"]), "")
        table.add_row(task["task"], shown, *([each] if many else []), f"{time_s:.1f} s", why)
    stdout.print(table)
    mean = () if found["mean_reward"] is None else (", mean reward ", (f"{found['mean_reward']:.3f}", "bold"))
    what = f"trials of {counted(found['n_tasks'], 'task')}" if many else "tasks"
    scored = f"{found['n_scored']} of {found['n_trials']} {what} scored by their own tests"
    stdout.print(Text.assemble(scored, *mean))
    stdout.print(f"traces: agentloop traces ls --project {out}", markup=False, soft_wrap=True)
