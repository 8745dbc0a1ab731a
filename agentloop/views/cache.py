"""A cache of values that are slow to read, bounded by their total size."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class SizedCache(Generic[Value]):
    """The values that were used last, whose sizes together are at most a maximum. Threads may share it."""

    def __init__(self, max_size: int, size: Callable[[Value], int]) -> None:
        """max_size: a single larger value stays until the next one is read."""
        self._max_size = max_size
        self._size = size
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable, read: Callable[[], Value]) -> Value:
        """The value of `key`; it is read if it is not there. Two threads may read the same one at once."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        # Without the lock: a read may take seconds, and other threads would wait for values that are here.
        value = read()
        with self._lock:
            self._values[key] = value
            while len(self._values) > 1 and sum(map(self._size, self._values.values())) > self._max_size:
                self._values.popitem(last=False)
        return value
