"""Keeps views that take longer to build than a page may, for a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

FRESH_S = 10.0
"""Seconds for which a view is shown again, although something that its stamp does not cover may have changed."""
MAX_VIEWS = 100

View = TypeVar("View")


class RecentViews(Generic[View]):
    """The last views by their parameters."""

    def __init__(self, fresh_s: float = FRESH_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._fresh_s = fresh_s
        self._clock = clock
        self._views: dict[Hashable, tuple[float, Hashable, View]] = {}

    def get(self, parameters: Hashable, stamp: Hashable, build: Callable[[], View]) -> View:
        """The view for `parameters`, built anew if it is older than `fresh_s` or has another stamp.

        stamp: changes whenever the view does, as far as that is cheap to know.
        """
        view = self.peek(parameters, stamp)
        if view is None:
            # Before the view is built, because it shows what was stored then.
            now = self._clock()
            view = build()
            if len(self._views) >= MAX_VIEWS:  # filters that somebody invents must not fill the memory
                self._views.clear()
            self._views[parameters] = (now, stamp, view)
        return view

    def peek(self, parameters: Hashable, stamp: Hashable) -> View | None:
        """The view if `get` would not build it anew; None otherwise."""
        built_at, old_stamp, view = self._views.get(parameters, (0.0, None, None))
        if old_stamp == stamp and self._clock() - built_at < self._fresh_s:
            return view
        return None
