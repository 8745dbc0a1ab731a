"""Planted faults, mined: which become cases, and is none of them a fault that does not show again?

    python benchmarks/mining.py

60 failed episodes in real boxes, each of a task of its own. 42 have a fault that is there each time or nearly, of
seven failure types; six of those show only after turns that are seldom taken, so that only a fork finds them again.
18 are no cases: a fault of every other time or less, one that the machine had and has no more, a model's endpoint
that is gone, a verifier that is wrong, flaky or can be fooled, a secret. Prints what was admitted; exits 1 when fewer
than 90% of the first kind were, one of the second, or when a case took more than 60 s.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentloop.agents.tool_loop import ToolLoop
from agentloop.errors import PolicyError
from agentloop.gate.outcomes import Side
from agentloop.gate.trials import Trials
from agentloop.mining.candidates import Signatures, candidates
from agentloop.mining.mine import Mine, Mined
from agentloop.policies.scripted import ScriptedPolicy, call_message
from agentloop.rollout.actors import Actor
from agentloop.sandbox.bubblewrap import BubblewrapBackend
from agentloop.sandbox.pool import SandboxPool
from agentloop.store.store import Store
from agentloop.types import Attempt, Limits, Message, Part, SandboxSpec, Split, Task, ToolCall
from agentloop.work.local import LocalWork

N_EACH, N_BAD = 6, 3
MIN_ADMITTED, MAX_S = 0.9, 60.0
MAX_TRIES = 200
"""Episodes until a fault has shown itself once."""
SECRET = "sk-" + "proj" + "A1b2C3d4E5f6G7h8I9j0K1l2"

Script = Callable[[Sequence[Message], random.Random], Message]


@dataclass
class Fault:
    """One task, and a policy that fails it."""

    kind: str
    """The failure type, or why it is no case."""
    good: bool
    task: Task
    script: Script
    mend: Callable[[], None] = lambda: None
    """What happens between the failure and the mining."""
    broken: bool = False
    """The policy's endpoint is gone by then."""


def shell(command: str) -> Message:
    return call_message("shell", command=command)


def submit(answer: str) -> Message:
    return call_message("submit", answer=answer)


def raw(name: str, arguments: str) -> Message:
    return Message(role="assistant", tool_calls=(ToolCall(id="call_0", name=name, arguments=arguments),))


def n_said(messages: Sequence[Message]) -> int:
    return sum(message.role == "assistant" for message in messages)


def turns(*planned: Message) -> Script:
    """These in order, the last of them again and again."""
    return lambda messages, _: planned[min(n_said(messages), len(planned) - 1)]


def right(ref: str) -> Script:
    return lambda messages, _: submit(messages[-1].content) if n_said(messages) else shell(ref)


def sometimes(p: float, wrong: Script, ref: str) -> Script:
    """`wrong` with probability `p`, drawn once an episode."""

    def script(messages: Sequence[Message], rng: random.Random) -> Message:
        if not n_said(messages):
            return wrong(messages, rng) if rng.random() < p else right(ref)(messages, rng)
        began_wrong = messages[1].tool_calls != shell(ref).tool_calls
        return (wrong if began_wrong else right(ref))(messages, rng)

    return script


class Gone(ScriptedPolicy):
    """An endpoint that does not answer any more."""

    async def complete(self, *_: object, **__: object) -> object:  # type: ignore[override]
        raise PolicyError("connection refused")


class Coin:
    """A verifier that says what it likes."""

    name, version = "coin", "1"

    def __init__(self) -> None:
        self.rng = random.Random(7)

    async def score(self, trace: object, sandbox: object) -> float:
        return float(self.rng.random() < 0.5)


def faults(folder: Path) -> Iterator[Fault]:
    rng, number = random.Random(3), 0

    def task(*verifiers: Part, max_steps: int = 5, text: str = "", solved: bool = True) -> tuple[Task, str, str]:
        """(a task about a file of its own, the command that answers it, the file's name)"""
        nonlocal number
        number += 1
        name, numbers = f"f{number:02}", rng.sample(range(100, 10_000), 12)
        home = folder / name
        home.mkdir(parents=True)
        (home / name).write_text("".join(f"{n}\n" for n in numbers))
        if text:
            (home / "settings").write_text(text)
        ref = f"sort -n {name} | tail -n1"
        parts = verifiers or (Part(kind="exact", options={"expected": str(max(numbers))}),)
        made = Task(
            id=name,
            instruction=f"What is the largest number in {name}?",
            split=Split.heldout,
            sandbox=SandboxSpec(files=home),
            limits=Limits(max_steps=max_steps, tool_timeout_s=10.0),
            verifiers=parts,
            solution=(ref,) if solved else (),
        )
        return made, ref, name

    for i in range(N_EACH):
        it, ref, name = task()
        wrong = right(f"sort -n {name} | head -n1")
        yield Fault("call.wrong_arguments", True, it, sometimes(0.95, wrong, ref) if i % 2 else wrong)
        it, ref, name = task()
        yield Fault("call.malformed", True, it, turns(raw("shell", ('{"command": "ls', "ls", '["ls"]')[i % 3])))
        it, ref, name = task()
        yield Fault("call.unknown_tool", True, it, turns(raw("bash", json.dumps({"command": ref})), submit("17")))
        it, ref, name = task()
        yield Fault("obs.misread", True, it, turns(shell(f"wc -l {name}"), shell(ref), submit("17")))
        it, ref, name = task()
        yield Fault("outcome.premature_stop", True, it, turns(Message(role="assistant", content="It is large.")))
        it, ref, name = task(max_steps=3)
        looks = [shell(command) for command in ("ls", f"wc -l {name}", f"head -n1 {name}")]
        yield Fault("budget.limit_reached", True, it, turns(*looks))
        it, ref, name = task()
        yield Fault("after a turn that is seldom taken", True, it, _noted(ref))
    for i in range(N_BAD):
        it, ref, name = task()
        yield Fault("coin", False, it, _coin(i, name, ref))
        it, ref, name = task()
        file, text = folder / name / name, (folder / name / name).read_text()
        file.write_text("5\n")
        yield Fault("machine", False, it, right(ref), mend=lambda file=file, text=text: file.write_text(text))  # type: ignore[misc]
        it, ref, name = task()
        yield Fault("endpoint", False, it, turns(submit("17")), broken=True)
        it, ref, name = task(Part(kind="exact", options={"expected": "-1"}))
        yield Fault("verifier wrong", False, it, right(ref))
        bad = (
            Part(kind="mining:Coin"),
            Part(kind="regex", options={"pattern": r"\d{2,}"}),
            Part(kind="regex", options={"pattern": ".*"}),
        )[i]
        it, ref, name = task(bad)
        yield Fault("verifier flaky or lenient", False, it, turns(Message(role="assistant")))
        it, ref, name = task(text=f"key = {SECRET}\n")
        yield Fault("secret", False, it, turns(shell("cat settings"), submit("17")))


def _coin(i: int, name: str, ref: str) -> Script:
    """Wrong at its first turn, at its last one, or at any, every other time or less: drawn anew each time."""
    if i == 0:
        return sometimes(0.5, right(f"sort -n {name} | head -n1"), ref)

    def script(messages: Sequence[Message], rng: random.Random) -> Message:
        if i == 2 and rng.random() < 0.15:
            return submit("17")
        if not n_said(messages):
            return shell(ref)
        return submit("17" if rng.random() < (0.4, 0.15)[i - 1] else messages[-1].content)

    return script


def _noted(ref: str) -> Script:
    """Seldom writes a note first, and then believes it."""

    def script(messages: Sequence[Message], rng: random.Random) -> Message:
        if not n_said(messages):
            return shell("echo 12 > note; ls") if rng.random() < 0.15 else shell(ref)
        if "note" in messages[-1].content:
            return shell("cat nowhere note")
        return submit(messages[-1].content.split()[-1])

    return script


async def shown(fault: Fault, pool: SandboxPool) -> Attempt:
    """The first episode in which it shows, as one of v1."""
    kept: list[Attempt] = []
    actor = Actor("recorded", ToolLoop(), ScriptedPolicy(fault.script))

    trials = Trials([fault.task], {Side.baseline: actor}, LocalWork(pool), run="planted", on_end=kept.append)
    for n in range(MAX_TRIES):
        outcome = await trials(fault.task.id, Side.baseline, n)
        if outcome.reward is not None and outcome.reward < 1:
            last, of = kept[-1], {"policy_version": 1}
            episode, trace = last.episode.model_copy(update=of), last.trace.model_copy(update=of)
            return last.model_copy(update={"episode": episode, "trace": trace})
    raise SystemExit(f"{fault.kind}: {MAX_TRIES} episodes of {fault.task.id} without the fault")


async def mined(planted: Sequence[Fault], folder: Path) -> dict[str, Mined]:
    """Task -> what came of its failure."""
    backend, store = BubblewrapBackend(), Store(folder / "traces" / "store.db")
    pool = SandboxPool(backend)
    try:
        for n, fault in enumerate(planted):
            store.put_attempts("planted", [await shown(fault, pool)], first=n)
            fault.mend()
    finally:
        await pool.close()
    by_task = {fault.task.id: fault for fault in planted}
    actors = {
        name: Actor("v1", ToolLoop(), (Gone if fault.broken else ScriptedPolicy)(fault.script))
        for name, fault in by_task.items()
    }
    signatures = Signatures(max_alike=len(planted))
    mine = Mine(
        folder / "evals" / "regressions",
        store,
        backend,
        lambda candidate: actors[candidate.task.id] if candidate.task else None,
        lambda _: None,
        signatures,
    )
    found = candidates(store, {name: fault.task for name, fault in by_task.items()}, signatures, every=True)
    done = {one.case.task: one async for one in mine.mine(found)}
    store.close()
    return done


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        planted = list(faults(folder / "evals" / "planted"))
        done = asyncio.run(mined(planted, folder))
    rows: dict[tuple[bool, str], Counter[str]] = {}
    for fault in planted:
        one = done.get(fault.task.id)
        row = rows.setdefault((fault.good, fault.kind), Counter())
        row["planted"] += 1
        row["admitted"] += bool(one and one.folder)
        row["by type"] += bool(one and (one.case.failure == fault.kind or "." not in fault.kind))
        if one and one.folder is None:
            for check in one.checks:
                row[f"not {check.name}"] += check.passed is False
        if one and one.folder:
            row[one.case.kind.partition("@")[0]] += 1
            row[f"as {one.case.failure}"] += one.case.failure != fault.kind
    print(f"{'planted fault':<36} {'planted':>8} {'admitted':>9}  kinds, and why not")
    for (_, kind), row in rows.items():
        others = [f"{name} {n}" for name, n in row.items() if name not in ("planted", "admitted", "by type") and n]
        print(f"{kind:<36} {row['planted']:>8} {row['admitted']:>9}  {', '.join(others)}")
    n_good = sum(row["planted"] for (good, _), row in rows.items() if good)
    n_admitted = sum(row["admitted"] for (good, _), row in rows.items() if good)
    n_wrong = sum(row["admitted"] for (good, _), row in rows.items() if not good)
    slowest = max(one.seconds for one in done.values())
    types = {one.case.failure for one in done.values() if one.folder}
    ok = n_admitted >= MIN_ADMITTED * n_good and not n_wrong and slowest <= MAX_S and len(types) >= 6
    total = {
        "planted": len(planted),
        "reproducible": n_good,
        "admitted": n_admitted,
        "irreproducible": len(planted) - n_good,
        "admitted_wrongly": n_wrong,
        "types": sorted(types),
        "slowest_s": round(slowest, 1),
        "mean_s": round(sum(one.seconds for one in done.values()) / len(done), 1),
        "labelled_as_planted": sum(row["by type"] for row in rows.values()),
        "load": os.getloadavg()[0],
        "ok": ok,
    }
    print(json.dumps({"mining": total}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.modules.setdefault("mining", sys.modules[__name__])
    sys.exit(main())
