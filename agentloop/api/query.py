"""`/api/v1`: stored traces by filter and by id, their spans by page, and scores and labels that come later.

Every answer is about the project of the key that asked. Cursors are the `next` of an earlier answer.
"""

from __future__ import annotations

from fastapi import APIRouter

from agentloop.api.failures import failure_routes
from agentloop.api.traces import trace_routes
from agentloop.api.verdicts import feedback_routes, verdict_routes
from agentloop.store.store import Store


def router(store: Store) -> APIRouter:
    """The routes over `store`."""
    routes = APIRouter(prefix="/api/v1")
    for part in (trace_routes, feedback_routes, verdict_routes, failure_routes):
        routes.include_router(part(store))
    return routes
