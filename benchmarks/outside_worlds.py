"""Environments of other projects, played in plain text: a number game of GEM, and a room of MiniGrid.

Both are as their projects ship them; the wrappers only say in words what can be seen, and read the answer as an action.
Gymnasium finds them as `outside_worlds:Guess-v0` and `outside_worlds:DoorKey-v0`.
"""

from __future__ import annotations

import random
import string
from typing import Any

import gymnasium
from gymnasium.spaces import Text

WORDS = Text(4_000, min_length=0, charset=string.printable)
MOVES = ("left", "right", "forward", "pickup", "drop", "toggle", "done")
"""Words for MiniGrid's actions 0 to 6."""
OBJECTS = {2: "wall", 4: "door", 5: "key", 8: "goal"}
"""MiniGrid's numbers of what DoorKey has."""
DOORS = ("open", "closed", "locked")
CENTRE, FRONT = 3, 5
"""Of the 7x7 view: the column that the agent looks along, and the row before it; the agent is in row 6."""


class Guess(gymnasium.Env[str, str]):
    """A game of GEM (arXiv:2510.01051): the number between 1 and 50, in at most 7 guesses. An answer is the number.

    Of the rules, which never change, the first observation has the last line.
    """

    observation_space = action_space = WORDS

    def __init__(self) -> None:
        import gem

        self._game = gem.make("game:GuessTheNumber-v0-hard")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The game draws its number from Python's global generator, which nobody else should find seeded."""
        state = random.getstate()
        super().reset(seed=seed)
        seen, info = self._game.reset(seed=seed)
        random.setstate(state)
        return seen.splitlines()[-1], info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The game ends with the right number, after the seventh guess, and after an answer without a number."""
        seen, reward, terminated, truncated, info = self._game.step(f"\\boxed{{{action}}}")
        return seen, float(reward), terminated, truncated, info


class DoorKey(gymnasium.Env[str, str]):
    """MiniGrid's DoorKey-5x5: find the key, open the door, go to the goal. An answer that is no move costs a step."""

    observation_space = action_space = WORDS

    def __init__(self) -> None:
        import minigrid  # noqa: F401 - registers its environments

        self._room = gymnasium.make("MiniGrid-DoorKey-5x5-v0", disable_env_checker=True)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        seen, info = self._room.reset(seed=seed)
        return described(seen["image"]), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        number = MOVES.index(action) if action in MOVES else MOVES.index("done")  # which does nothing in a DoorKey room
        seen, reward, terminated, truncated, info = self._room.step(number)
        return described(seen["image"]), float(reward), terminated, truncated, info


def described(view: Any) -> str:
    """What the agent sees, as `key 2 ahead 1 left, ...`, then what is just before it and beside it, and what it holds.

    view: shape (7, 7, 3), as MiniGrid has it: object, colour and state by column and row.
    """
    parts = []
    for column in range(7):
        for row in range(7):
            name = OBJECTS.get(int(view[column, row, 0]))
            if name in ("key", "door", "goal") and (column, row) != (CENTRE, FRONT + 1):
                state = f" {DOORS[view[column, row, 2]]}" if name == "door" else ""
                parts.append(f"{name}{state} {_place(column - CENTRE, FRONT + 1 - row)}")
    held = OBJECTS.get(int(view[CENTRE, FRONT + 1, 0]), "nothing")
    beside = (("front", CENTRE, FRONT), ("left", CENTRE - 1, FRONT + 1), ("right", CENTRE + 1, FRONT + 1))
    near = [f"{side} {OBJECTS.get(int(view[column, row, 0]), 'free')}" for side, column, row in beside]
    return ", ".join([*parts, *near, f"hold {held}"])


def _place(right: int, ahead: int) -> str:
    side = "" if right == 0 else f" {abs(right)} {'right' if right > 0 else 'left'}"
    return f"{ahead} ahead{side}"


gymnasium.register("Guess-v0", Guess)
gymnasium.register("DoorKey-v0", DoorKey)
