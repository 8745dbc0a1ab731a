"""What a key may still spend: its bounds and what it spent, as the store has them, and what is under way."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from agentloop.errors import AgentLoopError
from agentloop.store.keys import Key, Spent

MINUTE_S = 60.0


class Exhausted(AgentLoopError):
    """402: the key has spent what it may."""


class TooFast(AgentLoopError):
    """429: the key has made as many calls within a minute as it may."""

    def __init__(self, why: str, retry_s: int) -> None:
        super().__init__(why)
        self.retry_s = retry_s


class _Ledger:
    """A key as it was last looked up, and what it spent since.

    Of what came to the disk while it was looked up nobody knows whether the store counted it, so it counts twice
    until the next look rather than not at all.
    """

    def __init__(self, key: Key) -> None:
        self.key, self.since = key, Spent()
        self.begun: deque[float] = deque()
        """When its calls began, of the last minute, where these are bounded."""
        self._ended: deque[tuple[float, Spent]] = deque()
        """Each call of `since`, with the time at which it was on disk."""

    def read(self, key: Key) -> None:
        """A key, which may have been looked up before the one that is here."""
        if key.read_at <= self.key.read_at:
            return
        self.key = key
        while self._ended and self._ended[0][0] < key.read_at:
            self._sum(self._ended.popleft()[1], -1)

    def add(self, at: float, spent: Spent) -> None:
        self._ended.append((at, spent))
        self._sum(spent, 1)

    def pace(self, bound: int, now: float) -> None:
        """A call begins. Raises TooFast."""
        while self.begun and self.begun[0] <= now - MINUTE_S:
            self.begun.popleft()
        if len(self.begun) >= bound:
            retry_s = math.ceil(self.begun[0] + MINUTE_S - now) if self.begun else round(MINUTE_S)
            raise TooFast(
                f"key {self.key.id} may make {bound} calls a minute and has made them; the next one in {retry_s} s",
                retry_s,
            )
        self.begun.append(now)

    def _sum(self, spent: Spent, sign: int) -> None:
        (n_calls, n_tokens, cost_usd), (calls, tokens, usd) = self.since, spent
        self.since = Spent(n_calls + sign * calls, n_tokens + sign * tokens, cost_usd + sign * usd)


class Budgets:
    """For one process and its event loop.

    Calls that are under way count as calls; what tokens and money they will cost nobody knows, so a key may pass
    those two bounds by what it had under way when it reached them. The last minute's calls are those of this process.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ledgers: dict[str, _Ledger] = {}
        """By the id of the key."""
        self._under_way: dict[str, int] = {}

    def admit(self, key: Key | None) -> None:
        """A call begins, which `spend` ends. Raises Exhausted, and TooFast."""
        if key is None or not any(bound is not None for bound in key.budget):
            return
        ledger = self._ledgers.setdefault(key.id, _Ledger(key))
        ledger.read(key)
        n_under_way = self._under_way.get(key.id, 0)
        used = [before + since for before, since in zip(ledger.key.spent, ledger.since, strict=True)]
        used[0] += n_under_way
        *totals, per_minute = ledger.key.budget
        for bound, spent, what in zip(totals, used, ("calls", "tokens", "USD"), strict=True):
            if bound is not None and spent >= bound:
                raise Exhausted(
                    f"key {key.id} may spend {bound:g} {what} and has spent {spent:g}; "
                    f"`agentloop keys budget {key.id}` with a larger bound gives it more"
                )
        if per_minute is not None:
            ledger.pace(per_minute, self._clock())
        self._under_way[key.id] = n_under_way + 1

    def spend(self, key: Key | None, spent: Spent) -> None:
        """A call that was admitted has ended, and is on disk."""
        if key is None or key.id not in self._ledgers:
            return
        self._ledgers[key.id].add(self._clock(), spent)
        self._under_way[key.id] = self._under_way.get(key.id, 1) - 1
        if not self._under_way[key.id]:
            del self._under_way[key.id]
