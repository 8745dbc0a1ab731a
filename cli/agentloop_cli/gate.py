"""`agentloop gate`: whether a candidate is worse than a baseline, at a stated risk, in as few trials as that takes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentloop.errors import ConfigError

if TYPE_CHECKING:
    from agentloop.gate.outcomes import GateResult, Settings


class Inconclusive(StrEnum):
    """What a gate without a verdict ends with."""

    keep = "keep"
    passed = "pass"
    failed = "fail"


class Tape(StrEnum):
    """See `tapes.Tapes`, which loads too much for `--help`."""

    live = "live"
    stop = "stop"
    off = "off"


class Sampling(StrEnum):
    """Order of visits; see `outcomes.Settings`."""

    round_robin = "round-robin"
    iid = "iid"
    importance = "importance"


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
        Tape,
        typer.Option(
            rich_help_panel=COMPARED,
            help="Where the bank has a tape of this very policy: what a difference does, or off.",
        ),
    ] = Tape.live,
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
        typer.Option(rich_help_panel=OUTPUT, help="Folder of this run; by default one in runs/ of its own."),
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
    from agentloop_cli.gate_outputs import Outputs

    outputs = Outputs(as_json=as_json, junit=junit, sarif=sarif, html=html, summary=summary, pr_comment=pr_comment)
    settings: dict[str, Any] = {
        "delta": delta,
        "alpha": alpha,
        "beta": beta,
        "sampling": None if sampling is None else sampling.value,
        "per_visit": per_visit,
        "max_infra": max_infra,
        "reliability": reliability,
        "max_rollouts": max_rollouts,
        "seed": seed,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    if replay is not None:
        if _is_store(replay):
            if suites or out or not baseline or not candidate:
                raise ConfigError(
                    "--replay with stored runs needs --baseline FILTER and --candidate FILTER, and no SUITE or --out"
                )
            result = _compared(replay, tenant, baseline, candidate, settings, must_pass or ())
        elif suites or baseline or candidate or out:
            raise ConfigError(
                "--replay decides from its file alone; leave out SUITE, --baseline, --candidate and --out"
            )
        else:
            result = _replayed(Path(replay), settings, must_pass or ())
        outputs.write(result, [], None)
        raise typer.Exit(_exit_code(result, inconclusive))
    if not suites or not baseline or not candidate:
        raise ConfigError("name SUITE, --baseline and --candidate; or decide from stored outcomes with --replay FILE")
    from agentloop_cli.gate_run import folder_of, prepare, run_gate
    from agentloop_cli.tapes import Tapes

    asked = _settings(settings)
    tapes = Tapes(tape.value)
    prepared = prepare(suites, baseline, candidate, asked, must_pass or (), project, tapes, sandbox, baseline_project)
    folder = out or folder_of(prepared)
    result = run_gate(prepared, folder, n_concurrent, max_usd, max_minutes, project)
    outputs.write(result, [one.evals.folder for one in prepared.found], folder)
    raise typer.Exit(_exit_code(result, inconclusive))


def _settings(given: dict[str, Any]) -> Settings:
    from pydantic import ValidationError

    from agentloop.gate.outcomes import Settings

    try:
        return Settings.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        option, message = str(first["loc"][0]).replace("_", "-"), str(first["msg"])
        hint = "; 0.05 is 5 points" if option == "delta" else ""
        raise ConfigError(f"--{option} {first['input']}: {message[0].lower()}{message[1:]}{hint}") from None


def _is_store(place: str) -> bool:
    return "://" in place or Path(place).is_dir() or place.endswith(".db")


def _compared(
    place: str, tenant: str, baseline: str, candidate: str, settings: dict[str, Any], must_pass: Sequence[str]
) -> GateResult:
    """What two groups of stored runs say. place: a project folder or a store."""
    from agentloop.gate.outcomes import Side
    from agentloop.gate.result import fold
    from agentloop.gate.stored import stored_outcomes
    from agentloop_cli.stores import open_store

    is_folder = "://" not in place and Path(place).is_dir()
    store = open_store(None, project=Path(place), create=False) if is_folder else open_store(place, create=False)
    try:
        outcomes = stored_outcomes(store, {Side.baseline: baseline, Side.candidate: candidate}, project=tenant)
    finally:
        store.close()
    return fold(None, outcomes, settings=_settings(settings), must_pass=must_pass)


def _replayed(path: Path, given: dict[str, Any], must_pass: Sequence[str]) -> GateResult:
    """What a file of outcomes says; the options are for one without a header, which a header is not contradicted by."""
    from agentloop.gate.outcomes import read_outcomes
    from agentloop.gate.result import fold
    from agentloop_cli.evals import NoTasks

    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give the gate.outcomes.jsonl that a gate has written")
    header, outcomes = read_outcomes(path, path.read_text(encoding="utf-8", errors="replace"))
    if header is not None and (given or must_pass):
        option = next(iter(given), "must_pass").replace("_", "-")
        raise ConfigError(f"{path}: its header says what it was asked to show; leave --{option} out")
    if not outcomes:
        raise NoTasks(f"{path}: no outcomes, so there is nothing to decide; run the gate first")
    try:
        return fold(header, outcomes, settings=_settings(given), must_pass=must_pass)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _exit_code(result: GateResult, inconclusive: Inconclusive) -> int:
    from agentloop.gate.outcomes import GateVerdict

    if result.verdict is GateVerdict.inconclusive and inconclusive is not Inconclusive.keep:
        chosen = GateVerdict.passed if inconclusive is Inconclusive.passed else GateVerdict.failed
        return chosen.exit_code
    return result.verdict.exit_code
