"""Costs of traces by version, task, model or day, as the page of costs shows them. An unknown cost is never 0."""

from __future__ import annotations

from agentloop.store.cost_sums import CostBy, CostSum
from agentloop.store.store import Store
from agentloop.types import Frozen

MAX_ROWS = 200


class CostLine(Frozen):
    """The costs of some traces."""

    value: str | None
    """Version, task, model or day; None for traces without one."""
    n: int
    n_solved: int
    """Traces with a reward of 1."""
    n_prompt_tokens: int | None
    """None if nobody counted the tokens of any of the traces."""
    n_completion_tokens: int | None
    n_uncounted: int
    """Traces whose tokens are in no sum because nobody counted them."""
    usd: float | None
    """Cost of all traces; None if that of any is unknown."""
    usd_known: float | None
    """Cost of the traces whose cost is known; None without any."""
    n_unknown: int
    """Traces whose cost is unknown."""
    usd_per_solved: float | None
    """`usd` for each solved trace."""


class CostTable(Frozen):
    """The page of costs."""

    by: CostBy
    total: CostLine
    lines: tuple[CostLine, ...]
    """Versions and days by their order, the newest first; tasks and models by cost, then by tokens."""
    n_lines: int
    is_bounded: bool
    """There are older traces than the 200,000 newest ones, which were summed."""


def cost_table(store: Store, filter: str = "", *, project: str, by: CostBy = "version") -> CostTable:
    """The costs of the traces for which a filter holds. Raises ConfigError."""
    begin = store.begin_of_sums(project)
    sums = store.cost_sums(by, filter, project=project, after=begin)
    if by in ("version", "day"):
        sums.sort(key=lambda one: one.value or 0 if by == "version" else str(one.value or ""), reverse=True)
    else:
        sums.sort(key=lambda one: (-one.usd, -one.n_prompt_tokens - one.n_completion_tokens, str(one.value)))
    return CostTable(
        by=by,
        total=_line(_total(sums)),
        lines=tuple(_line(one) for one in sums[:MAX_ROWS]),
        n_lines=len(sums),
        is_bounded=begin > 0,
    )


def _total(sums: list[CostSum]) -> CostSum:
    columns = [sum(column) for column in list(zip(*sums, strict=True))[1:]] or [0] * 7
    return CostSum._make((None, *columns))


def _line(one: CostSum) -> CostLine:
    is_counted = one.n_uncounted < one.n
    # A sum without its unknown part would be read as the whole cost.
    usd = one.usd if not one.n_unknown and one.n else None
    return CostLine(
        value=None if one.value is None else str(one.value),
        n=one.n,
        n_solved=one.n_solved,
        n_prompt_tokens=one.n_prompt_tokens if is_counted else None,
        n_completion_tokens=one.n_completion_tokens if is_counted else None,
        n_uncounted=one.n_uncounted,
        usd=usd,
        usd_known=one.usd if one.n_unknown < one.n else None,
        n_unknown=one.n_unknown,
        usd_per_solved=usd / one.n_solved if usd is not None and one.n_solved else None,
    )
