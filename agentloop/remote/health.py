"""Whether the workers of this machine do their work: a heartbeat alone does not show that."""

from __future__ import annotations

import platform
from datetime import UTC, datetime

from agentloop.store.store import Store
from agentloop.store.units import QueueFacts, WorkerFacts
from agentloop.types import UnitState
from agentloop.work.worker import LEASE_S

MAX_WAIT_S = 60.0
"""Seconds that a unit may wait although a worker has room for it."""


def worker_problem(store: Store, host: str | None = None) -> str:
    """What is wrong with the workers of a machine, in a line; "" if nothing is. host: its name; default: this one."""
    host = host or platform.node()
    mine = [one for one in store.workers() if one.host == host and one.state != "gone"]
    if not mine:
        return f"no worker of {host} is known to {store.name}; start `agentloop worker`"
    alive = [one for one in mine if one.age_s < LEASE_S]
    if not alive:
        latest = min(one.age_s for one in mine)
        return f"the last heartbeat of a worker of {host} is {latest:.0f} s old; see its log"
    stuck = [queue for queue in store.queues() if any(_ignores(one, queue) for one in alive)]
    if stuck:
        kind = stuck[0].kind
        return f"units of kind {kind} have waited for more than {MAX_WAIT_S:.0f} s although a worker of {host} has room"
    return ""


def _ignores(worker: WorkerFacts, queue: QueueFacts) -> bool:
    """Whether the worker could do a unit that has waited for long."""
    can = queue.kind in worker.kinds and set(worker.has).issuperset(queue.needs)
    has_room = worker.state == "up" and worker.n_busy < worker.n_slots
    if not can or not has_room or queue.oldest_at is None or not queue.n.get(UnitState.ready):
        return False
    return (datetime.now(UTC) - queue.oldest_at).total_seconds() > MAX_WAIT_S
