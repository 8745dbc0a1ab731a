"""Other gates in the worlds of `gate.py`: false alarms, wrong PASS, power and rollouts, beside ours.

    python benchmarks/gate_others.py                    500 worlds of each kind, some minutes on two cores
    python benchmarks/gate_others.py --worlds 100       a look

A *peer* sees what its user would give it: the rewards of both sides as arrays (trial of the task, task), nan where an
attempt was lost. Two peers are other projects' programs: agentassay's DeploymentGate (AGPL) and maida-ai's one-sided
Wilson rule. Each runs in a virtual environment that the first run makes for this benchmark alone. A peer that cannot be
installed, or whose Python is missing, is named with the reason and left out. Both count a lost attempt as failed here.
`wins minus losses` counts over tasks and passes a candidate that wins more often than it loses; an attempt that could
not run loses. The last line is JSON.

`naive`, `mcnemar` and `peeking` are for `gate.py`: (does it fail the candidate, rollouts) for every world.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gate_worlds import DELTA, KINDS, Array, K, worlds
from scipy.stats import binom

LEVEL, STEP = 0.05, 50
Verdicts = list[tuple[bool, int]]
HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentloop" / "benchmarks"


# ------------------------------------------------------------------- rules on success rates, for gate.py


def naive(p: Array, q: Array, rng: np.random.Generator, n: int, tolerance: float) -> Verdicts:
    """Fails on a drop in success rate of more than `tolerance` over the first n tasks, one trial each side."""
    before, after = (rng.random((len(p), n)) < one[:, :n] for one in (p, q))
    return [(bool(drop > tolerance + 1e-12), 2 * n) for drop in before.mean(1) - after.mean(1)]


def mcnemar(p: Array, q: Array, rng: np.random.Generator, n: int) -> Verdicts:
    """Exact and one-sided, on n pairs over the tasks in turn."""
    wins, losses = discordant(p, q, rng, n)
    return [(p_value(int(w), int(d)) <= LEVEL, 2 * n) for w, d in zip(wins[:, -1], losses[:, -1], strict=True)]


def peeking(p: Array, q: Array, rng: np.random.Generator, n: int) -> Verdicts:
    """The same, looked at after every STEP pairs, and stopped at the first p-value below LEVEL."""
    found: Verdicts = []
    for wins, losses in zip(*discordant(p, q, rng, n), strict=True):
        looks = range(STEP - 1, n, STEP)
        stop = next((t for t in looks if p_value(int(wins[t]), int(losses[t])) <= LEVEL), None)
        found.append((False, 2 * n) if stop is None else (True, 2 * (stop + 1)))
    return found


def discordant(p: Array, q: Array, rng: np.random.Generator, n: int) -> tuple[Array, Array]:
    """(pairs that the candidate alone passes, pairs that it alone fails) after each of n pairs."""
    tasks = np.arange(n) % p.shape[1]
    before, after = (rng.random((len(p), n)) < one[:, tasks] for one in (p, q))
    return (after & ~before).cumsum(1), (before & ~after).cumsum(1)


@cache
def p_value(wins: int, losses: int) -> float:
    """Chance of so many losses among the discordant pairs, were both sides as likely."""
    return float(binom.sf(losses - 1, wins + losses, 0.5))


# ------------------------------------------------------------------------- peers, from outcome arrays


class World(NamedTuple):
    """Rewards as arrays (trial of the task, task): 0, 1, or nan for an attempt that was lost."""

    bank: Array
    """The baseline's, recorded earlier."""
    baseline: Array
    """The baseline's now, beside the candidate's of the same number."""
    candidate: Array


Judge = Callable[[list[World]], list[str]]
"""PASS, FAIL or INCONCLUSIVE for each world."""


class Peer(NamedTuple):
    """Another gate with the number of rollouts that it asks for."""

    name: str
    judge: Judge
    rollouts: int
    """Of one world: the baseline's that it cannot take from the bank, and the candidate's."""
    n_rounds: int
    """Trials of each task that it needs of the candidate."""
    slow: bool = False
    """Looks at a tenth of the worlds."""


def wins_minus_losses(worlds: list[World], n_rounds: int) -> list[str]:
    """Passes a candidate with more wins than losses over n_rounds attempts at each task."""
    verdicts = []
    for world in worlds:
        before, after = (np.nan_to_num(side[:n_rounds], nan=-1.0) for side in (world.baseline, world.candidate))
        verdicts.append("PASS" if (after > before).sum() > (after < before).sum() else "FAIL")
    return verdicts


def counts(rewards: Array) -> tuple[int, int]:
    """(passes, trials); a lost attempt is a trial that failed."""
    return int(np.nansum(rewards)), int(rewards.size)


class Program:
    """A rule that runs in an environment with one package, as a process that is asked by JSON lines."""

    def __init__(self, python: Path, script: str) -> None:
        self._process = subprocess.Popen(
            [python, HERE / script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, worlds: list[Any]) -> list[str]:
        """Raises SystemExit when the program ended, with what it printed above."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(worlds) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self._process.args} ended with exit code {self._process.wait()}")
        verdicts: list[str] = json.loads(answer)
        return verdicts

    def close(self) -> None:
        self._process.communicate()


def agentassay(program: Program, n_rounds: int, *, by_task: bool) -> Judge:
    """One scenario for the whole suite, or one for each task."""

    def scenarios(world: World) -> dict[str, tuple[int, ...]]:
        before, after = world.baseline[:n_rounds], world.candidate[:n_rounds]
        if not by_task:
            return {"suite": (*counts(before), *counts(after))}
        return {f"t{i}": (*counts(before[:, i]), *counts(after[:, i])) for i in range(before.shape[1])}

    return lambda worlds: program.ask([scenarios(world) for world in worlds])


def maida(program: Program, n_rounds: int, below: float) -> Judge:
    """The lowest pass rate that is allowed is the recorded baseline's mean, less `below`."""

    def asked(world: World) -> tuple[int, int, float]:
        return (*counts(world.candidate[:n_rounds]), max(0.0, float(np.nanmean(world.bank)) - below))

    return lambda worlds: program.ask([asked(world) for world in worlds])


# --------------------------------------------------------------------------------- their environments


class Package(NamedTuple):
    """What a program of others needs."""

    requirement: str
    script: str
    python: tuple[int, int]
    """The oldest that it runs on."""


AGENTASSAY = Package("agentassay==0.2.3", "peer_agentassay.py", (3, 10))
MAIDA = Package("maida-ai==0.6.1", "peer_maida.py", (3, 12))


def started(package: Package) -> Program | str:
    """The program in its environment, made on the first run; or why there is none."""
    folder = CACHE / package.requirement
    python = folder / "bin" / "python"
    if not python.exists():
        outer = python_at_least(package.python)
        if outer is None:
            return f"needs Python {'.'.join(map(str, package.python))} or newer, and none was found"
        subprocess.run([outer, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", package.requirement]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"cannot be installed: {done.stderr.strip().splitlines()[-1]}"
    return Program(python, package.script)


def python_at_least(version: tuple[int, int]) -> str | None:
    """A Python of that version or newer: this one, one on PATH, or one of pyenv's."""
    if sys.version_info >= version:
        return sys.executable
    root = os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv"
    names = [f"python3.{minor}" for minor in range(version[1], version[1] + 4)]
    for candidate in [*names, *sorted(glob.glob(f"{root}/versions/*/bin/python3"))]:
        check = [candidate, "-c", f"import sys; sys.exit(sys.version_info < {version})"]
        try:
            if subprocess.run(check, capture_output=True, check=False).returncode == 0:
                return candidate
        except OSError:
            continue
    return None


def peers() -> tuple[list[Peer], dict[str, str], list[Program]]:
    """(those that can be asked here, package -> why it is left out, their programs)."""
    found = [
        Peer("wins minus losses, 1 attempt a task", lambda them: wins_minus_losses(them, 1), 400, 1),
        Peer("wins minus losses, 3 attempts a task", lambda them: wins_minus_losses(them, 3), 1200, 3),
    ]
    missing: dict[str, str] = {}
    programs = []
    for package in (AGENTASSAY, MAIDA):
        program = started(package)
        if isinstance(program, str):
            missing[package.requirement] = program
            continue
        programs.append(program)
        if package is AGENTASSAY:
            found += [
                Peer("agentassay, a scenario of 600 trials", agentassay(program, 3, by_task=False), 1200, 3),
                Peer(
                    "agentassay, 30 trials of each task", agentassay(program, 30, by_task=True), 12_000, 30, slow=True
                ),
            ]
        else:
            found += [
                Peer("maida, >= the bank's mean", maida(program, 6, 0.0), 1200, 6),
                Peer("maida, >= the bank's mean - 5", maida(program, 6, DELTA), 1200, 6),
            ]
    return found, missing, programs


# ------------------------------------------------------------------------------------------ the table


def drawn(kind: str, n: int, n_rounds: int) -> list[World]:
    """n worlds of a kind in which nothing is lost."""
    rng = np.random.default_rng([5, KINDS.index(kind), n_rounds])
    return [
        World(*((rng.random((rounds, len(p))) < rates).astype(float)
                for rounds, rates in ((K, p), (n_rounds, p), (n_rounds, q))))
        for p, q in zip(*worlds(kind, n, 0), strict=True)
    ]  # fmt: skip


def shares(verdicts: list[str], rollouts: float) -> dict[str, float]:
    row = {name: verdicts.count(name) / len(verdicts) for name in ("FAIL", "PASS", "INCONCLUSIVE")}
    return {**row, "mean": rollouts, "n": len(verdicts)}


def ours(kind: str, n: int) -> dict[str, float]:
    """Our gate in the worlds of the same success rates; it draws its own attempts."""
    from gate import play  # which imports the rules above

    rows = [play(p, q, i) for i, (p, q) in enumerate(zip(*worlds(kind, n, 0), strict=True))]
    return shares([verdict for verdict, _ in rows], float(np.mean([rollouts for _, rollouts in rows])))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=500)
    args = parser.parse_args()
    started_at = time.perf_counter()
    found, missing, programs = peers()
    for package, why in missing.items():
        print(f"not compared: {package} {why}")
    print(f"{'world':<14} {'gate':<38}{'FAIL':>7}{'PASS':>7}{'INCON':>7} {'rollouts':>9}")
    table: dict[str, dict[str, dict[str, float]]] = {}
    for kind in KINDS:
        rows = {"agentloop gate": ours(kind, args.worlds)}
        for peer in found:
            n = max(20, args.worlds // 10) if peer.slow else args.worlds
            rows[peer.name] = shares(peer.judge(drawn(kind, n, peer.n_rounds)), peer.rollouts)
        for name, row in rows.items():
            rates = "".join(f"{row[verdict]:>7.3f}" for verdict in ("FAIL", "PASS", "INCONCLUSIVE"))
            print(f"{kind:<14} {name:<38}{rates} {row['mean']:>9.0f}", flush=True)
        table[kind] = rows
    for program in programs:
        program.close()
    figures = {
        name: {
            "false_alarm": max(table[kind][name]["FAIL"] for kind in ("null", "heterogeneous")),
            "wrong_pass_5pt": max(table[kind][name]["PASS"] for kind in ("down5", "broken5")),
            "power_5pt": min(table[kind][name]["FAIL"] for kind in ("down5", "broken5")),
            "mean_rollouts_5pt": table["down5"][name]["mean"],
        }
        for name in table["null"]
    }
    spent = {"worlds": args.worlds, "wall_s": time.perf_counter() - started_at, "load": os.getloadavg()[0]}
    print(json.dumps({"gates": figures, "missing": missing, **spent}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
