"""The last updates of a turn, so that what one of them sampled is compared with the trainer as it was then.

An update is in memory while an attempt of it may still be trained on. After an interruption it comes from the folder
that the server read it from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from agentloop.errors import TrainingError
from agentloop.registry.artifacts import ADAPTER
from agentloop.train.model import Trainable


class Updates:
    """Trained tensors by the number of updates of the turn, from 0."""

    def __init__(self, trainable: Trainable, max_lag: int, folder_of: Callable[[int], Path]) -> None:
        """max_lag: updates that an attempt may be behind. folder_of: where an update's adapter is saved."""
        self._trainable = trainable
        self._max_lag = max_lag
        self._folder_of = folder_of
        self._states: dict[int, Mapping[str, Tensor]] = {}

    def save_first(self) -> None:
        """Before the first update: its folder is written here, the others are those of `Host.publish`."""
        if self._max_lag:
            self._trainable.save(self._folder_of(0))

    def keep(self, number: int) -> None:
        """The model is now as `number` updates left it. Nothing is copied where no attempt may lag behind."""
        if not self._max_lag:
            return
        self._states[number] = self._trainable.state()
        for old in [each for each in self._states if each < number - self._max_lag]:
            del self._states[old]

    @contextmanager
    def as_of(self, number: int) -> Iterator[bool]:
        """The model is as `number` updates left it inside the block; False where nothing has that update any more."""
        state = self._states.get(number) or self._saved(number)
        if state is None:
            yield False
            return
        now = self._trainable.state()
        self._trainable.load_state(state)
        try:
            yield True
        finally:
            self._trainable.load_state(now)

    def _saved(self, number: int) -> Mapping[str, Tensor] | None:
        try:
            return self._trainable.read(self._folder_of(number) / ADAPTER)
        except TrainingError:
            return None
