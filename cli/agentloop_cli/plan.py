"""`agentloop plan`, `execute` and `collect`: a run of suites on machines of other schedulers, with files between."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from agentloop.errors import counted
from agentloop_cli.render import AsJson, LiveProgress, print_json, stderr, stdout
from agentloop_cli.stores import ProjectFolder, same_project
from agentloop_cli.tasks import INFRASTRUCTURE, INTERRUPTED, exit_code, note, show_run

PlanFolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Folder that `agentloop plan` wrote.")]


def plan(
    suite: Annotated[list[Path], typer.Argument(help="Folders of suites in the project.")],
    policy: Annotated[str, typer.Option(help="REF: vN, live, FILE.toml, scripted:FILE.py:function, or oracle.")],
    out: Annotated[Path, typer.Option(help="Folder for the plan: new, or with the same plan.")],
    shards: Annotated[int, typer.Option(min=1, max=100_000, help="Parts that machines do separately.")] = 1,
    trials: Annotated[int, typer.Option(min=1, max=1000, help="Attempts per task.")] = 1,
    sandbox: Annotated[str | None, typer.Option(help="auto, docker or bubblewrap; overrides the settings.")] = None,
    name: Annotated[
        str | None,
        typer.Option("--as", help="Name of a separate run; default: continue the run of this policy on this suite."),
    ] = None,
    project: ProjectFolder = Path(),
    as_json: AsJson = False,
) -> None:
    """Write down a run of suites for a Slurm array, an Indexed Job or a CI matrix.

    Each machine then does one shard with `agentloop execute DIR --shard K`, and
    needs only a copy of DIR. `agentloop collect DIR` stores what they did.
    Attempts that the project's store has are not planned.

    Exit codes: 0 planned, 2 an argument is wrong, 5 all attempts are stored.
    """
    from agentloop.library.plans import PlanOptions, plan_suites

    document = plan_suites(PlanOptions(suite, policy, out, shards, trials, sandbox, name, project), note)
    if as_json:
        print_json(document)
        return
    units = f"{counted(document['n_units'], 'unit')} in {counted(shards, 'shard')}"
    _print(f"{units}: agentloop execute {shlex.quote(str(out))} --shard K, for each K from 0 to {shards - 1}")
    _print(f"then: agentloop collect {shlex.quote(str(out))}{same_project(project)}")


def execute(
    folder: PlanFolderArgument,
    shard: Annotated[int, typer.Option(help="Number of the shard, from 0; such as $SLURM_ARRAY_TASK_ID.")],
    n_concurrent: Annotated[int, typer.Option(min=1, help="Units at once.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Do one shard of a plan, and write the results into its folder.

    It needs no project, no store and no network, and executes code from the plan.
    If it is ended, the same command does what is missing. It also repeats attempts
    that got no reward.

    Exit codes: 0 the shard is done, 2 an argument is wrong, 4 an attempt got no
    reward or this machine cannot make it, 130 interrupted.
    """
    from agentloop.library.blocking import run_blocking
    from agentloop.remote.execution import execute_shard

    with _interruptible(), LiveProgress() as progress:
        done = run_blocking(
            execute_shard(folder, shard, n_concurrent, lambda n: progress.start(f"shard {shard}", n), progress.advance)
        )
    if as_json:
        print_json(done._asdict())
    else:
        _print(f"shard {shard}: {counted(done.n_units, 'unit')}, {done.n_before} done before, {done.n_failed} failed")
    raise typer.Exit(INFRASTRUCTURE if done.n_failed else 0)


def collect(folder: PlanFolderArgument, project: ProjectFolder = Path(), as_json: AsJson = False) -> None:
    """Store the attempts of a plan in the project, and show them as `agentloop run` does.

    All are stored in one transaction; if one is missing, none is, and the message
    names the command that makes it. Collected again, nothing changes.

    Exit codes: 0 all scored, 1 a unit has no result, or the oracle failed a task,
    2 an argument is wrong, 4 an attempt got no reward.
    """
    from agentloop.library.plans import collect_plan, commands_of

    document, failed_shards = collect_plan(folder, project)
    if as_json:
        print_json(document)
    else:
        show_run(document, project)
    if failed_shards:
        note(f"attempts without a reward: to repeat them, {commands_of(folder, failed_shards)}, then collect again")
    raise typer.Exit(exit_code(document))


def _print(line: str) -> None:
    stdout.print(line, markup=False, soft_wrap=True)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ends the block with its sandboxes removed at Ctrl-C, and at SIGTERM, which schedulers send."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    except KeyboardInterrupt:
        stderr.print("interrupted; what had ended is in the folder, and the same command continues", markup=False)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, before)
