"""The games of `outside.py`: what each is, the program that a model imitates first, how it learns, and the goals."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from outside_worlds import MOVES

from agentloop.types import EnvironmentSpec, Limits, Message, Part

Program: TypeAlias = Callable[[Sequence[Message], random.Random], Message]


@dataclass(frozen=True)
class Game:
    """One environment, how it is learned, and what is to be reached."""

    name: str
    spec: EnvironmentSpec
    limits: Limits
    verifier: Part
    shows: Program
    """The clumsy program's next answer."""
    n_shown: int
    """Its episodes."""
    warm_steps: int
    kind: str
    options: Mapping[str, Any]
    learning: Mapping[str, Any]
    n_turns: int
    """Turns of the trainer, each from the version before."""
    n_unseen: int
    """Environment seeds of the measurement after learning."""
    goal: float
    before: float = 1.0
    """What it may reach at most before it learns."""
    n_before: int = 400
    """Of the one before: a model that only wanders takes every step that it may."""
    max_episodes: int | None = None
    max_steps: int | None = None
    max_cpu_s: float | None = None
    vocabulary: int = 600
    width: int = 128
    """Of the model, which has two layers."""
    temperature: float = 1.0
    """Of the measured attempts; those that train are sampled at 1."""


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


def forgetful(messages: Sequence[Message], rng: random.Random) -> Message:
    """A number between the bounds that it heard; one time in three it forgets them."""
    low, high = bounds(messages)
    if rng.random() < 0.35:
        low, high = 1, 50
    return said(str(rng.randint(low, high)))


def halves(messages: Sequence[Message], rng: random.Random) -> Message:
    """Binary search."""
    low, high = bounds(messages)
    return said(str((low + high) // 2))


def any_number(messages: Sequence[Message], rng: random.Random) -> Message:
    return said(str(rng.randint(1, 50)))


def any_move(messages: Sequence[Message], rng: random.Random) -> Message:
    return said(rng.choice(MOVES))


def bounds(messages: Sequence[Message]) -> tuple[int, int]:
    """Where the number is, after what was heard."""
    low, high = 1, 50
    for message in messages:
        for side, guess in re.findall(r"(lower|higher) than (\d+)", message.content):
            if side == "lower":
                high = min(high, int(guess) - 1)
            else:
                low = max(low, int(guess) + 1)
    return low, high


GAMES = {
    "guess": Game(
        name="guess",
        spec=EnvironmentSpec(id="outside_worlds:Guess-v0", text=True),
        limits=Limits(max_steps=7, max_tokens=4),
        verifier=Part(kind="env_return", options={"threshold": 1.0}),
        shows=forgetful,
        n_shown=800,
        warm_steps=600,
        kind="grpo",
        options={"entropy_floor": 0.02, "entropy_weight": 0.05},
        learning={"steps_per_turn": 30, "n_tasks": 16, "group_size": 16, "learning_rate": 4e-4},
        n_turns=1,
        n_unseen=400,
        goal=0.95,
        before=0.5,
        max_episodes=20_000,
    ),
    "doorkey": Game(
        name="doorkey",
        spec=EnvironmentSpec(id="outside_worlds:DoorKey-v0", text=True, window=1),
        limits=Limits(max_steps=250, max_tokens=3),
        verifier=Part(kind="env_return", options={"low": 0.0, "high": 1.0}),
        shows=any_move,
        n_shown=12,
        warm_steps=150,
        kind="ppo",
        options={"gamma": 0.995, "lam": 0.95, "entropy_floor": 0.02, "entropy_weight": 0.05},
        learning={"steps_per_turn": 40, "n_tasks": 8, "group_size": 2, "learning_rate": 1e-3},
        n_turns=1,
        n_unseen=100,
        goal=0.95,
        max_steps=80_000,
        max_cpu_s=600.0,
        width=64,
        n_before=16,
    ),
}
BASELINES = {"guess": {"random": any_number, "binary search": halves}, "doorkey": {"random": any_move}}
