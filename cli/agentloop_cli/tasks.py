"""`agentloop run`: trials of Harbor task folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from agentloop.config.layout import RUNS
from agentloop.errors import counted
from agentloop_cli.render import AsJson, LiveProgress, print_json, stderr, stdout

FAILED_CHECK, INFRASTRUCTURE, INTERRUPTED = 1, 4, 130


class PolicyKind(StrEnum):
    """Who is asked: see `[policy] kind`."""

    openai = "openai"
    vllm = "vllm"
    litellm = "litellm"


class AgentChoice(StrEnum):
    """Who works on the tasks."""

    oracle = "oracle"
    nop = "nop"
    tool_loop = "tool_loop"
    command = "command"


def run(
    folders: Annotated[list[Path], typer.Argument(help="Task folders, or folders of task folders.")],
    agent: Annotated[
        AgentChoice | None,
        typer.Option(
            help="The tasks' own solution, nobody, the built-in agent or a program; default: \\[agent], else tool_loop."
        ),
    ] = None,
    policy: Annotated[
        PolicyKind,
        typer.Option(help="How tool_loop and command reach a model: an endpoint, a vLLM server or litellm."),
    ] = PolicyKind.openai,
    base_url: Annotated[str | None, typer.Option(help="OpenAI-compatible endpoint; litellm may need none.")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name at the endpoint, or its litellm name.")] = None,
    command: Annotated[
        str | None,
        typer.Option(help="Shell command that starts the agent in the sandbox; $AGENTLOOP_INSTRUCTION holds the task."),
    ] = None,
    agent_files: Annotated[
        Path | None, typer.Option(help="Folder with the agent's program, mounted in the sandbox as /agent.")
    ] = None,
    sandbox: Annotated[str, typer.Option(help="auto, docker or bubblewrap.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for the traces.")] = RUNS,
    trials: Annotated[int, typer.Option(min=1, max=1000, help="Attempts per task.")] = 1,
    n_concurrent: Annotated[int, typer.Option(min=1, help="Attempts at once.")] = 2,
    canaries: Annotated[
        bool, typer.Option(help="Plant a decoy answer, test and credential in /var/lib/grader.")
    ] = True,
    tool: Annotated[
        list[str] | None, typer.Option(help="A tool of tool_loop: shell, python, files, ...; may be repeated.")
    ] = None,
    mcp: Annotated[
        list[str] | None,
        typer.Option(help="Tools of an MCP server: NAME=COMMAND in the sandbox, or NAME=URL; may be repeated."),
    ] = None,
    compaction: Annotated[
        str | None, typer.Option(help="Action when the context is full: none, drop or summarise.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run Harbor tasks: an agent works in a sandbox with the task's image, and the task's tests score it.

    A task is a folder with task.toml, instruction.md, tests/test.sh and
    environment/Dockerfile. The default agent needs --base-url and --model,
    and its key, if any, in AGENTLOOP_POLICY__API_KEY. Set its tools with the
    options or the table `agent` of agentloop.toml in this folder, and prices
    of models in the tables `prices`.
    --agent command needs the same. It runs any program that reads OPENAI_BASE_URL
    or ANTHROPIC_BASE_URL, inside the sandbox, with only the network that the
    task allows.

    Exit codes: 0 all scored, 1 the oracle failed a task, 2 a task is wrong,
    4 an attempt got no reward, 130 interrupted.
    """
    from agentloop.harbor.options import AgentOptions
    from agentloop.harbor.run import RunOptions, run_folders

    chosen = AgentOptions(agent, policy, base_url, model, command, agent_files, tool, mcp or (), compaction)
    options = RunOptions(folders, sandbox, out, trials, n_concurrent, canaries)
    with _explained_interrupt(out), LiveProgress() as progress:
        document = run_folders(options, chosen.make, progress, _note)
    if as_json:
        print_json(document)
    else:
        _show(document, out)
    raise typer.Exit(_exit_code(document, agent))


def _note(line: str) -> None:
    stderr.print(f"note: {line}", markup=False)


@contextmanager
def _explained_interrupt(out: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        stderr.print(
            f"interrupted; trials that had ended are kept in {out}, and the same command starts anew", markup=False
        )
        raise typer.Exit(INTERRUPTED) from None


def _exit_code(document: Mapping[str, Any], agent: AgentChoice | None) -> int:
    if document["n_scored"] < document["n_trials"]:
        return INFRASTRUCTURE
    is_broken = agent is AgentChoice.oracle and any(trial["reward"] < 1.0 for trial in document["trials"])
    return FAILED_CHECK if is_broken else 0


def _show(result: Mapping[str, Any], out: Path) -> None:
    many = result["n_trials"] > result["n_tasks"]
    table = Table(box=None, pad_edge=False)
    for heading in ("task", "reward", *(["each"] if many else []), "time", "why"):
        table.add_column(heading, justify="right" if heading in {"reward", "time"} else "left", overflow="fold")
    for task in result["tasks"]:
        trials = [trial for trial in result["trials"] if trial["task"] == task["task"]]
        reward, time_s = task["mean_reward"], sum(trial["duration_s"] for trial in trials) / len(trials)
        marks = (
            Text(trials[0]["state"], "yellow")
            if reward is None
            else Text(f"{reward:.3g}", "green" if reward >= 1 else "red")
        )
        each = " ".join("-" if each is None else f"{each:.3g}" for each in task["rewards"])
        why = next((trial["why"] for trial in trials if trial["why"]), "")
        table.add_row(task["task"], marks, *([each] if many else []), f"{time_s:.1f} s", why)
    stdout.print(table)
    mean = () if result["mean_reward"] is None else (", mean reward ", (f"{result['mean_reward']:.3f}", "bold"))
    what = f"trials of {counted(result['n_tasks'], 'task')}" if many else "tasks"
    scored = f"{result['n_scored']} of {result['n_trials']} {what} scored by their own tests"
    stdout.print(Text.assemble(scored, *mean))
    stdout.print(f"traces: agentloop traces ls --project {out}", markup=False, soft_wrap=True)
