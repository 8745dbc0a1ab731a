"""Costs of stored traces: tokens, money, and their share of a stage's energy."""

from __future__ import annotations

from collections.abc import Iterator

from agentloop.costs.totals import EpisodeCost, shares, spent
from agentloop.otel.stored_trace import read_each
from agentloop.store.store import Store


def stored_costs(store: Store, filter: str, project: str | None) -> Iterator[EpisodeCost]:
    """The costs of each trace that matches `filter`, with its share of its stage's energy by time."""
    stages = store.stages()
    times: dict[str, list[float]] = {}
    for stored in read_each(store, store.every(filter, project=project)):
        stage = stages.get(stored.row.stage or "")
        energy = {}
        if stage is not None and stored.row.project == store.project:  # `stages` are those of this project
            if stage.name not in times:
                attempts = store.every(f'stage:"{stage.name}"', project=store.project)
                times[stage.name] = [row.duration_s for row in attempts]
            in_stage = times[stage.name]
            energy = shares(stage.metrics, len(in_stage), stored.row.duration_s, sum(in_stage))
        yield spent(stored.trace, stored.verdict, energy)
