"""Outcomes -> GateResult: the whole way, for outcomes that are all there and for a gate that is under way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentloop.gate.fold import Fold
from agentloop.gate.outcomes import GateResult, Header, Outcome, Settings
from agentloop.gate.replay import arrange
from agentloop.gate.summary import summarise


def result_of(under_way: Fold) -> GateResult:
    """The result as if no more outcomes came; more may be added to the fold afterwards."""
    return summarise(under_way.ended())


def fold(
    header: Header | None,
    outcomes: Iterable[Outcome],
    *,
    settings: Settings | None = None,
    must_pass: Sequence[str] = (),
    looks: bool = True,
) -> GateResult:
    """The gate's word on outcomes that are all there; the same for the same outcomes.

    settings, must_pass (patterns of task ids): for outcomes without a header. Raises ConfigError; see `arrange`.
    """
    arranged = arrange(header, list(outcomes), settings or Settings(), must_pass)
    state = Fold(arranged.header, arranged.order, looks=looks)
    for outcome in arranged.outcomes:
        state.add(outcome)
    state.close()
    return summarise(state)
