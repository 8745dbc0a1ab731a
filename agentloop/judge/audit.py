"""What an audit of rewards found, and the ways in which it tries to fool them.

Who tries them is told by what a task is: `harbor/audit.py` and `gate/audit.py`. A task's own solution
must score 1 every time, doing nothing and random commands 0, and no cheat anything. A trial that gives
no reward fools nobody; what a task's tests cannot know is not looked for here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from agentloop.errors import CapabilityError
from agentloop.protocols import SandboxBackend
from agentloop.types import FailureType, Frozen, RewardState, Verdict

CHEATS = Path(__file__).with_name("cheats.toml")
ORACLE, NOBODY, RANDOM = "oracle", "nop", "random"
N_ORACLE = 3
RUN = "audit"


class Cheat(Frozen):
    """A way to a reward without the work."""

    name: str
    tries: str
    """One line."""
    run: str
    """Shell commands that use $PATHS, what the task asks to be made, and $WORK, where commands start."""


def refuse_no_box(backend: SandboxBackend) -> None:
    """Raises CapabilityError: a cheat may remove all that it can reach."""
    if backend.isolation == "none":
        raise CapabilityError(f"{backend.name} is no box, and an audit breaks what it can; use docker or bubblewrap")


@cache
def known_cheats() -> tuple[Cheat, ...]:
    """Those of cheats.toml, in its order."""
    return tuple(Cheat(**told) for told in tomllib.loads(CHEATS.read_text())["cheat"])


@dataclass
class TaskAudit:
    """What the trials of one task came to."""

    task: str
    oracle: list[float | None] = field(default_factory=list)
    """Its rewards; None for a trial without one."""
    why: str | None = None
    """What stood in the way of the first of them that is not 1, or of all."""
    empty: float | None = None
    random: float | None = None
    fooled_by: dict[str, float] = field(default_factory=dict)
    """Cheat -> the reward it got."""
    no_reward: dict[str, str] = field(default_factory=dict)
    """Agent -> why its trial gave no reward."""
    flagged: list[str] = field(default_factory=list)
    """Cheats that were found out, whatever their reward."""
    n_cheats: int = 0
    waits: str | None = None
    """Whom its verifier waits for, so that no trial here says anything of it; None for others."""

    def note(self, agent: str, verdict: Verdict, why: str | None) -> None:
        """Take in one trial. why: what stood in the way of its whole reward."""
        reward = verdict.reward
        if verdict.state is RewardState.unscored and self.waits is None:
            self.waits = next((score.error for score in verdict.scores if score.waiting), None)
        if agent == ORACLE:
            self.oracle.append(reward)
            if reward != 1.0 and self.why is None:
                self.why = why or (f"it is {verdict.state}" if reward is None else f"it scores {reward:g}")
            return
        if verdict.state is not RewardState.scored:
            self.no_reward[agent] = why or ""
        if agent == NOBODY:
            self.empty = reward
        elif agent == RANDOM:
            self.random = reward
        else:
            self.n_cheats += 1
            if reward:
                self.fooled_by[agent] = reward
            if any(failure.type is FailureType.outcome_reward_hack for failure in verdict.failures):
                self.flagged.append(agent)

    @property
    def problems(self) -> list[str]:
        """A line each; none for a task whose reward can be believed, or that waits for somebody."""
        if self.waits:
            return []
        found = []
        n_passed = sum(reward == 1.0 for reward in self.oracle)
        if not self.oracle:
            found.append(f"not known: {self.why}")
        elif not n_passed:
            found.append(f"broken: its own solution does not score 1 ({self.why})")
        elif n_passed < len(self.oracle):
            found.append(f"flaky: its own solution scored 1 in {n_passed} of {len(self.oracle)} trials ({self.why})")
        if self.empty:
            found.append(f"lenient: doing nothing scores {self.empty:g}")
        if self.random:
            found.append(f"lenient: random commands score {self.random:g}")
        found += [f"fooled by {name}: {reward:g}" for name, reward in self.fooled_by.items()]
        for name, doing in ((NOBODY, "doing nothing"), (RANDOM, "random commands")):
            if name in self.no_reward:  # a cheat that wrecks its box says nothing against the task
                found.append(f"no reward for {doing}, where it should be 0: {self.no_reward[name]}")
        return found


def document(audits: Sequence[TaskAudit], sandbox: str) -> dict[str, Any]:
    """The one document of `--json`."""
    return {
        "sandbox": sandbox,
        "n_tasks": len(audits),
        "n_cheats": sum(one.n_cheats for one in audits),
        "n_fooled": sum(len(one.fooled_by) for one in audits),
        "n_waiting": sum(one.waits is not None for one in audits),
        "ok": not any(one.problems for one in audits),
        "tasks": [
            {
                "task": one.task,
                "oracle": one.oracle,
                "empty": one.empty,
                "random": one.random,
                "n_cheats": one.n_cheats,
                "fooled_by": one.fooled_by,
                "found_out": one.flagged,
                "no_reward": one.no_reward,
                "waits": one.waits,
                "problems": one.problems,
            }
            for one in audits
        ],
    }
