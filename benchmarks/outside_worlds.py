"""Environments of other projects, played in plain text: a number game of GEM, and a room of MiniGrid.

Both are as their projects ship them. The wrappers only say in few words what can be seen, and read the answer as an
action.
Gymnasium finds them as `outside_worlds:Guess-v0` and `outside_worlds:DoorKey-v0`.
"""

from __future__ import annotations

import random
import re
import string
from itertools import product
from typing import Any

import gymnasium
from gymnasium.spaces import Text

WORDS = Text(4_000, min_length=0, charset=string.printable)
UNITS = ("", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEENS = (
    "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
NAMES = (
    "zero",
    *UNITS[1:],
    *TEENS,
    *(f"{ten}{unit}" for ten in ("twenty", "thirty", "forty") for unit in UNITS),
    "fifty",
)
"""Of the numbers 0 to 50: a word each, which is one token of a tokenizer that was trained on them."""
MOVES = ("left", "right", "forward", "pickup", "drop", "toggle", "done")
"""Words for MiniGrid's actions 0 to 6."""
OBJECTS = {2: "wall", 4: "door", 5: "key", 8: "goal"}
"""MiniGrid's numbers of what DoorKey has."""
DOORS = ("open", "closed", "locked")
HERE, FRONT, LEFT, RIGHT = (3, 6), (3, 5), (2, 6), (4, 6)
"""Column and row in the 7x7 view of the agent, which looks towards row 0, and of the cells at its sides."""


class Guess(gymnasium.Env[str, str]):
    """A game of GEM (arXiv:2510.01051): the number between 1 and 50, in at most 7 guesses. An answer is its name.

    The rules never change and are left out. Of the hints so far, such as `At turn 1, you guessed 25, and the target
    number is lower than 25.`, an observation repeats the nearest ones in few words: `higher twelve lower twentyfive`.
    The game says nothing else that helps, and what lies between is for the player to find.
    """

    observation_space = action_space = WORDS

    def __init__(self) -> None:
        import gem

        self._game = gem.make("game:GuessTheNumber-v0-hard")
        self._hints: dict[str, int] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The game draws its number from Python's global generator, which nobody else should find seeded."""
        state = random.getstate()
        super().reset(seed=seed)
        _, info = self._game.reset(seed=seed)
        random.setstate(state)
        self._hints = {}
        return self._observation(), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The game ends with the right number, after the seventh guess, and after an answer without a number."""
        guess = NAMES.index(action) if action in NAMES else "no number"
        seen, reward, terminated, truncated, info = self._game.step(f"\\boxed{{{guess}}}")
        hint = re.search(r"the target number is (lower|higher) than (\d+)", seen)
        if hint is not None:
            number = int(hint[2])
            nearest = min if hint[1] == "lower" else max
            self._hints[hint[1]] = nearest(number, self._hints.get(hint[1], number))
        return self._observation(), float(reward), terminated, truncated, info

    def _observation(self) -> str:
        words = [f"{side} {NAMES[self._hints[side]]}" for side in ("higher", "lower") if side in self._hints]
        return " ".join(words) or "guess"


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
    """What is in front, left and right of the agent, what it holds, and the rest of what it sees with its cell.

    As in `free wall locked key goal cf`: a word each, so that a prompt is short. A cell is its column, a to g, and its
    row, h to n.

    view: shape (7, 7, 3), as MiniGrid has it: object, colour and state by column and row.
    """
    words = [_name(view[cell]) or "free" for cell in (FRONT, LEFT, RIGHT)]
    words.append("key" if _name(view[HERE]) == "key" else "nothing")
    for column, row in product(range(7), range(7)):
        name = _name(view[column, row])
        if name not in (None, "wall") and (column, row) != HERE:
            words.append(f"{name} {'abcdefg'[column]}{'hijklmn'[row]}")
    return " ".join(words)


def _name(cell: Any) -> str | None:
    """The object in a cell, a door by its state; None if it is empty or not seen."""
    name = OBJECTS.get(int(cell[0]))
    return DOORS[cell[2]] if name == "door" else name


gymnasium.register("Guess-v0", Guess)
gymnasium.register("DoorKey-v0", DoorKey)
