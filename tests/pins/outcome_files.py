"""The 50 outcome files of the gate's pin: made once, from fixed seeds, and kept in `outcomes.zip`.

Written as plain JSON, key by key, so that nothing of the engine decides what the files hold.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
SAME = [0.9, 0.5, 0.1, 0.95]
WORSE = [0.6, 0.2, 0.0, 0.7]
BETTER = [1.0, 0.9, 0.8, 1.0]
SLIGHTLY_WORSE = [0.86, 0.46, 0.06, 0.91]
GOOD, GONE = [0.95], [0.0]


@dataclass(frozen=True)
class OutcomeFile:
    """One file, and the options it is replayed with."""

    name: str
    text: str
    options: tuple[str, ...] = ()


def outcome_files() -> list[OutcomeFile]:
    """All of them, in order."""
    return [*bare_files(), *disordered_files(), *header_files(), *case_files(), *control_files(), *refused_files()]


# ------------------------------------------------------------------------------------------------------------- rows


def row(task: str, side: str, trial: int, reward: float | None, **more: object) -> Row:
    """reward None: infrastructure lost it."""
    state = "infra_failed" if reward is None else "scored"
    return {"task_id": task, "policy": side, "trial": trial, "reward": reward, "state": state, **more}


def names(n: int, letter: str = "t") -> list[str]:
    return [f"{letter}{number:02}" for number in range(n)]


def draws(seed: str, tasks: Sequence[str], rates: Sequence[float], n: int, side: str, first: int = 0) -> list[Row]:
    """n rounds over all tasks; `rates` repeat."""
    rng = random.Random(f"{seed} {side}")
    return [
        row(task, side, first + trial, float(rng.random() < rates[number % len(rates)]))
        for trial in range(n)
        for number, task in enumerate(tasks)
    ]


def both(seed: str, n_tasks: int, bank: int, rounds: int, rates: Sequence[float]) -> list[Row]:
    """A bank of SAME, then the candidate's rounds."""
    tasks = names(n_tasks)
    return [*draws(seed, tasks, SAME, bank, "baseline"), *draws(seed, tasks, rates, rounds, "candidate")]


def losing(rows: Sequence[Row], share: float, seed: str, side: str = "candidate") -> list[Row]:
    """The same, with a share of one side's trials lost."""
    rng = random.Random(seed)
    return [
        row(one["task_id"], side, one["trial"], None, why="no box: the engine did not answer")
        if one["policy"] == side and rng.random() < share
        else one
        for one in rows
    ]


def text(rows: Sequence[Row], header: dict[str, Any] | None = None) -> str:
    lines = [*([{"gate": header}] if header is not None else []), *rows]
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def head(n_tasks: int, bank: int, part: dict[str, Any] | None = None, **more: object) -> dict[str, Any]:
    """The header of a gate over one suite. part: more keys of the suite."""
    suite = {"name": "notes", "hash": "5f0a", "tasks": names(n_tasks), **(part or {})}
    return {"format": 1, "suites": [suite], "bank_trials": bank, "baseline": "main", "candidate": "v4", **more}


# ------------------------------------------------------------------------------------------------------- the files


def bare_files() -> Iterator[OutcomeFile]:
    """Rows alone, as somebody else's simulation writes them, and what options change."""
    for name, rates, rounds in (
        ("same", SAME, 6),
        ("worse", WORSE, 6),
        ("better", BETTER, 6),
        ("slightly-worse", SLIGHTLY_WORSE, 8),
    ):
        yield OutcomeFile(f"bare-{name}", text(both(name, 20, 16, rounds, rates)))
    rows = both("options", 20, 16, 6, WORSE)
    yield OutcomeFile("bare-strict-alpha", text(rows), ("--alpha", "0.0001"))
    yield OutcomeFile("bare-budget", text(rows), ("--max-rollouts", "15"))
    yield OutcomeFile("bare-per-visit", text(rows), ("--per-visit", "4"))
    yield OutcomeFile("bare-patterns", text(rows), ("--must-pass", "t0[0-3]", "--reliability", "0.9"))
    equal = text(both("equal", 12, 8, 3, SAME))
    yield OutcomeFile("bare-wide-delta", equal, ("--delta", "0.3", "--beta", "0.2"))
    yield OutcomeFile("bare-inconclusive-passes", equal, ("--inconclusive", "pass"))
    yield OutcomeFile("bare-inconclusive-fails", equal, ("--inconclusive", "fail"))
    yield OutcomeFile("bare-at-random", text(at_random("iid", 20, 16, 90, WORSE)), ("--sampling", "iid"))
    yield OutcomeFile("bare-one-task", text(both("one", 1, 40, 10, [0.2])))
    yield OutcomeFile("bare-fractions", text(fractions()))


def disordered_files() -> Iterator[OutcomeFile]:
    """Losses, and files whose rows stand in another order than a gate leaves them."""
    rows = both("order", 16, 12, 4, WORSE)
    mine = [one for one in rows if one["policy"] == "candidate"]
    theirs = [one for one in rows if one["policy"] == "baseline"]
    yield OutcomeFile("lost-some", text(losing(rows, 0.08, "some")))
    yield OutcomeFile("lost-many", text(losing(rows, 0.4, "many")))
    yield OutcomeFile("lost-all", text(losing(rows, 1.0, "all")))
    yield OutcomeFile("lost-bank", text(losing(rows, 1.0, "bank", "baseline")))
    losses = [row(one["task_id"], "candidate", one["trial"], None) if one["reward"] == 0 else one for one in mine]
    yield OutcomeFile("lost-failures", text([*theirs, *losses]), ("--max-infra", "1"))
    yield OutcomeFile("order-candidate-first", text([*mine, *theirs]))
    yield OutcomeFile("order-by-task", text([*theirs, *sorted(mine, key=lambda one: one["task_id"])]))
    yield OutcomeFile("order-from-one", text([{**one, "trial": one["trial"] + 1} for one in rows]))
    one_counter = [{**one, "trial": number} for number, one in enumerate(mine)]
    random.Random("counted").shuffle(one_counter)
    yield OutcomeFile("order-one-counter", text([*theirs, *one_counter]))
    holes = [one for one in one_counter if one["trial"] % 7]
    yield OutcomeFile("order-holes", text([*theirs, *holes]))
    yield OutcomeFile("order-doubled", text([*theirs, *mine, *mine[:20], {**mine[0], "reward": 1 - mine[0]["reward"]}]))
    pairs = [one for pair in zip(draws("pairs", names(16), SAME, 4, "baseline"), mine, strict=True) for one in pair]
    yield OutcomeFile("order-pairs-without-bank", text(pairs))


def header_files() -> Iterator[OutcomeFile]:
    """Files as a live gate leaves them, in each order of visits, and several suites."""
    for sampling in ("round-robin", "iid", "importance"):
        for name, rates in (("same", SAME), ("worse", WORSE)):
            settings = {"sampling": sampling, "seed": 7, "per_visit": 2, "delta": 0.1}
            yield OutcomeFile(
                f"{sampling}-{name}",
                text(both(f"{sampling} {name}", 12, 24, 14, rates), head(12, 24, settings=settings)),
            )
    settings = {"sampling": "importance", "delta": 0.2}
    passing = text(both("importance better", 12, 24, 24, BETTER), head(12, 24, settings=settings))
    yield OutcomeFile("importance-better", passing)
    yield OutcomeFile("suites-weighted", text(*several(BETTER)))
    yield OutcomeFile("suites-one-worse", text(*several(WORSE)))
    yield OutcomeFile("rich-rows", text(rich_rows(), head(8, 8)))


def case_files() -> Iterator[OutcomeFile]:
    """Cases each of which must pass, and tasks in quarantine."""
    for name, rates in (("hold", [1.0]), ("broken", GONE), ("flaky", [0.5])):
        part = {"must_pass": names(4, "m"), "quarantined": names(3, "q")}
        rows = both(f"cases {name}", 10, 12, 5, BETTER)
        for letter, n, case_rates in (("m", 4, rates), ("q", 3, [0.5])):
            rows += draws(f"{name} {letter}", names(n, letter), GOOD, 12, "baseline")
            rows += draws(f"{name} {letter}", names(n, letter), case_rates, 6, "candidate")
        yield OutcomeFile(f"cases-{name}", text(rows, head(10, 12, part, settings={"delta": 0.25})))
    cases = draws("alone", names(3, "m"), GOOD, 8, "baseline") + draws("alone", names(3, "m"), [1.0], 6, "candidate")
    yield OutcomeFile("cases-alone", text(cases, head(0, 8, {"must_pass": names(3, "m")})))


def control_files() -> Iterator[OutcomeFile]:
    """Fresh attempts of the baseline beside the candidate's: pairs, drift, and outages of a family."""
    tasks, fresh = names(12), draws("fresh", names(12), SAME, 14, "baseline", first=12)
    rows = both("pairs", 12, 12, 14, WORSE)
    yield OutcomeFile("pairs-changed", text([*rows, *fresh], head(12, 12, environment="changed", controls=1)))
    yield OutcomeFile("pairs-unknown-cut", text([*rows, *fresh[:40]], head(12, 12, controls=1)))
    drift = draws("drift", tasks, WORSE, 14, "baseline", first=12)
    same: dict[str, Any] = {"environment": "same", "controls": 2}
    yield OutcomeFile("controls-drift", text([*rows, *drift], head(12, 12, **same)))
    yield OutcomeFile("controls-same-version", text([*rows, *drift], head(12, 12, **same, is_same_version=True)))
    why = "scripted:p.py:good is not in this folder"
    yield OutcomeFile("baseline-gone", text(rows, head(12, 12, environment="changed", controls=1, no_baseline=why)))
    families = {"families": {task: f"f{number % 4}" for number, task in enumerate(names(32))}}
    yield OutcomeFile("burst-candidate", text(outage("candidate"), head(32, 16, families)))
    after = draws("after", names(32), GOOD, 5, "baseline", first=16)
    yield OutcomeFile("burst-bank", text([*outage("baseline"), *after], head(32, 16, families, **same)))


def refused_files() -> Iterator[OutcomeFile]:
    """Files that no verdict comes from: one line each."""
    rows = both("refused", 6, 4, 2, SAME)
    yield OutcomeFile("refused-empty", text([], head(6, 4)))
    yield OutcomeFile("refused-foreign-task", text([*rows, row("x", "candidate", 0, 1.0)], head(6, 4)))
    yield OutcomeFile("refused-reward", text([*rows, row("t00", "candidate", 9, 1.5)]))


# -------------------------------------------------------------------------------------------------- parts of files


def at_random(seed: str, n_tasks: int, bank: int, n: int, rates: Sequence[float]) -> list[Row]:
    """The candidate's trials are of tasks that were drawn one by one."""
    rng, tasks = random.Random(seed), names(n_tasks)
    rows = draws(seed, tasks, SAME, bank, "baseline")
    counts = dict.fromkeys(tasks, 0)
    for _ in range(n):
        number = rng.randrange(n_tasks)
        task = tasks[number]
        rows.append(row(task, "candidate", counts[task], float(rng.random() < rates[number % len(rates)])))
        counts[task] += 1
    return rows


def fractions() -> list[Row]:
    """Rewards between 0 and 1."""
    rng = random.Random("fractions")
    rows = both("fractions", 15, 12, 5, SAME)
    shift = {"baseline": 0.0, "candidate": -0.2}
    return [{**one, "reward": round(min(1, max(0, rng.gauss(0.6, 0.2) + shift[one["policy"]])), 3)} for one in rows]


def several(rates: Sequence[float]) -> tuple[list[Row], dict[str, Any]]:
    """Two suites, one of which counts twice and has the given rates. Returns (rows, header)."""
    parts = [("alpha", "a", 2.0, BETTER), ("beta", "b", 1.0, rates)]
    suites = [
        {
            "name": name,
            "hash": f"hash-{name}",
            "weight": weight,
            "tasks": names(8, letter),
            "must_pass": [f"{letter}-m"],
        }
        for name, letter, weight, _ in parts
    ]
    rows = [one for name, letter, _, _ in parts for one in draws(name, names(8, letter), SAME, 16, "baseline")]
    for name, letter, _, own in parts:
        rows += draws(name, names(8, letter), own, 16, "candidate")
        rows += draws(f"{name} case", [f"{letter}-m"], GOOD, 8, "baseline")
        rows += draws(f"{name} case", [f"{letter}-m"], [1.0], 6, "candidate")
    return rows, {"suites": suites, "bank_trials": 16, "settings": {"delta": 0.2, "per_visit": 1}}


def rich_rows() -> list[Row]:
    """Every key that a row can have, and text that is not to be trusted."""
    rows = both("rich", 8, 8, 4, WORSE)
    for number, one in enumerate(rows):
        one.update(trace_id=f"{one['policy'][0]}{number:04}", cost_usd=round(0.001 * number, 4), duration_s=1.5)
        one["started_at"] = f"2026-01-02T03:{number // 60:02}:{number % 60:02}Z"
        if one["reward"] == 0:
            one.update(failure="call.wrong_arguments", why="<b>no such file</b>\n::error::owned \u202e")
    mine = [one for one in rows if one["policy"] == "candidate"]
    mine[3].update(reward=None, state="unscored", why="verifier.py: KeyError")
    mine[5].update(reward=None, state="disputed", why="two verifiers disagree")
    mine[7].update(played=True, cost_usd=0.0)
    mine[9].update(n_lost=2)
    mine[11].update(reward=None, state="infra_failed", refused=True, why="the endpoint answered 401")
    return rows


def outage(side: str) -> list[Row]:
    """One family of four fails for three rounds of one side; otherwise both sides are alike."""
    rng, tasks = random.Random(f"outage {side}"), names(32)
    rows = draws("outage", tasks, GOOD, 16, "baseline") + draws("outage", tasks, GOOD, 5, "candidate")
    for one in rows:
        is_out = one["policy"] == side and int(one["task_id"][1:]) % 4 == 0 and one["trial"] in (1, 2, 3)
        if is_out and rng.random() < 0.95:
            one["reward"] = 0.0
    return rows
