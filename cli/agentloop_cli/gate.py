"""`agentloop gate`: whether a candidate is worse than a baseline, at a stated risk, in as few trials as that takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentloop.gate.options import OnDivergence, Sampling
from agentloop_cli.gate_options import (
    Comparison,
    Figures,
    Inconclusive,
    Named,
    exit_code,
    replayed,
    run_with_display,
)
from agentloop_cli.gate_outputs import Outputs

COMPARED, SURE, BUDGET = "What is compared", "How sure", "Budget"
OUTPUT, STORED = "Output", "From stored outcomes"
"""Panels of the help."""


def gate(
    suites: Annotated[
        list[str] | None,
        typer.Argument(help="Folders of suites or of Harbor tasks; SUITE=2 has twice the weight."),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(rich_help_panel=COMPARED, help="Needed: name of a bank in SUITE/baseline, or its path."),
    ] = None,
    candidate: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=COMPARED, help="Needed: vN, live, FILE.toml, scripted:FILE.py:function, or oracle."
        ),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(rich_help_panel=SURE, help="The drop that PASS rules out: 0.05 is 5 points of success. [0.05]"),
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(rich_help_panel=SURE, help="Risk of FAIL for a candidate that is no worse. [0.05]")
    ] = None,
    beta: Annotated[
        float | None,
        typer.Option(rich_help_panel=SURE, help="Risk of PASS for a candidate that is worse by delta. [0.05]"),
    ] = None,
    sampling: Annotated[
        Sampling | None, typer.Option(rich_help_panel=SURE, help="Order of visits; round-robin without it.")
    ] = None,
    per_visit: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=SURE, help="Banked trials in a visit; as many as leave 800 visits, at most a quarter."
        ),
    ] = None,
    max_infra: Annotated[
        float | None,
        typer.Option(rich_help_panel=SURE, help="Share of lost attempts above which nothing is claimed. [0.15]"),
    ] = None,
    reliability: Annotated[
        float | None,
        typer.Option(rich_help_panel=SURE, help="How often a must-pass case passes when nothing is broken. [0.95]"),
    ] = None,
    must_pass: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", rich_help_panel=COMPARED, help="Tasks each of which must pass, beside those tagged so."
        ),
    ] = None,
    max_rollouts: Annotated[
        int | None, typer.Option(rich_help_panel=BUDGET, help="Trials after which nothing more is asked. [5000]")
    ] = None,
    max_usd: Annotated[
        float | None, typer.Option(min=0, rich_help_panel=BUDGET, help="Money after which nothing more is asked.")
    ] = None,
    max_minutes: Annotated[
        float | None, typer.Option(min=0, rich_help_panel=BUDGET, help="Time of this run, likewise.")
    ] = None,
    n_concurrent: Annotated[int, typer.Option(min=1, rich_help_panel=BUDGET, help="Trials at once.")] = 4,
    sandbox: Annotated[
        str | None, typer.Option(rich_help_panel=COMPARED, help="auto, docker or bubblewrap; overrides the settings.")
    ] = None,
    tape: Annotated[
        OnDivergence,
        typer.Option(
            rich_help_panel=COMPARED,
            help="Where the bank has a tape of this very policy: what a difference does, or off.",
        ),
    ] = OnDivergence.live,
    seed: Annotated[int | None, typer.Option(rich_help_panel=SURE, help="Decides the order of visits. [0]")] = None,
    project: Annotated[
        Path, typer.Option("--project", "-p", rich_help_panel=COMPARED, help="Where vN and paths of policies start.")
    ] = Path(),
    baseline_project: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=COMPARED,
            help="Where the baseline's policy is as it was banked, such as a check-out of the main branch. [--project]",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(rich_help_panel=OUTPUT, help="Folder of this run; default: a new one in .agentloop/runs/."),
    ] = None,
    inconclusive: Annotated[
        Inconclusive,
        typer.Option(rich_help_panel=OUTPUT, help="Exit code without a verdict: 3, or that of PASS or FAIL."),
    ] = Inconclusive.keep,
    replay: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            rich_help_panel=STORED,
            help="Decide without rolling out: from a file of outcomes, or from the runs in a project folder or store, "
            "where --baseline and --candidate are filters.",
        ),
    ] = None,
    tenant: Annotated[
        str, typer.Option(rich_help_panel=STORED, help="The project (tenant) of the store whose runs count.")
    ] = "default",
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print one JSON document on stdout.")
    ] = False,
    junit: Annotated[Path | None, typer.Option(rich_help_panel=OUTPUT, help="Write JUnit XML here.")] = None,
    sarif: Annotated[
        Path | None, typer.Option(rich_help_panel=OUTPUT, help="Write SARIF of broken cases here.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(rich_help_panel=OUTPUT, help="Write the report here, beside the run's own.")
    ] = None,
    summary: Annotated[
        bool, typer.Option(rich_help_panel=OUTPUT, help="Add to $GITHUB_STEP_SUMMARY, where there is one.")
    ] = True,
    pr_comment: Annotated[
        bool, typer.Option(rich_help_panel=OUTPUT, help="Keep one comment on the pull request up to date.")
    ] = False,
) -> None:
    """Compare a candidate with a baseline bank, trial by trial, until the evidence is enough.

    FAIL says that the candidate is worse, PASS that it is not worse by delta.
    Each is wrong with at most the stated probability, however often you look,
    if attempts are independent and the baseline is measured in the same environment.
    The same command continues a run that was interrupted.

    Where the environment is what it was when the bank was filled, a visit compares one trial of the candidate with
    banked trials of the same task. Elsewhere it compares it with a fresh attempt of the baseline at the same time.
    You need SUITE, --baseline and --candidate, or --replay.

    Exit codes: 0 PASS, 1 FAIL, 2 something named is wrong, 3 INCONCLUSIVE,
    4 INFRA or too much was lost, 5 no tasks, 130 interrupted.
    """
    outputs = Outputs(as_json, junit, sarif, html, summary, pr_comment)
    figures = Figures(delta, alpha, beta, sampling, per_visit, max_infra, reliability, max_rollouts, seed)
    if replay is not None:
        named = Named(bool(suites), baseline, candidate, out is not None)
        result = replayed(replay, tenant, named, figures, must_pass or ())
        outputs.write(result, [], None)
    else:
        compared = Comparison(suites, baseline, candidate, project, baseline_project, sandbox, tape, must_pass or ())
        options = compared.options(
            figures, out=out, n_concurrent=n_concurrent, max_usd=max_usd, max_minutes=max_minutes
        )
        result, folders, run_folder = run_with_display(options)
        outputs.write(result, folders, run_folder)
    raise typer.Exit(exit_code(result, inconclusive))
