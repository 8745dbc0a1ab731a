"""The routes of the service, read from the app itself, and what fills them.

A new one needs a value for its parameters in FILLED, and where it takes a body, one in BODIES.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from agentloop.api.app import make_app
from agentloop.api.pages.paths import is_page
from agentloop.store.store import Store

from .serving import SPAN, request

FILLED = {
    "verifier": "human", "detector": "human", "kind": "plan.repetition", "version": "v1", "number": "1",
    "gate_id": "gate-0.00000000-1", "task_id": "sum-f1", "move": "pause",
}  # fmt: skip
BODIES: dict[str, Any] = {
    "/v1/traces": request(SPAN),
    "/v1/logs": {},
    "/api/v1/feedback": {"trace": SPAN["traceId"], "score": 1},
    "scores": {"value": 1},
    "labels": {"evidence": ""},
    "reward": {"reward": 1},
    "answer": {"reward": 1, "why": "x"},
    "undo": {},
    "resolution": {"reward": 1, "why": "x"},
    "promote": {"override": "x"},
    "rollback": {"why": "x"},
    "change": {"end": True},
    "cancel": {"why": "x"},
}
"""By the path, or by its last word that is no parameter."""

QUERIES = {"/api/v1/traces/{trace_id}/compare": "?with={trace_id}"}
"""Parameters that a route needs besides those of its path."""


class Way(NamedTuple):
    """One way in."""

    method: str
    template: str

    def path(self, trace_id: str) -> str:
        template = self.template.replace(":path}", "}") + QUERIES.get(self.template, "")
        return template.format(trace_id=trace_id, **FILLED)

    def body(self) -> Any:
        fixed = [part for part in self.template.split("/") if not part.startswith("{")]
        return BODIES.get(self.template, BODIES.get(fixed[-1]))


def app_of(store: Store) -> FastAPI:
    """The app within its middlewares."""
    app: Any = make_app(store)
    while not isinstance(app, FastAPI):
        app = app.app
    return app


def read_ways(store: Store) -> list[Way]:
    """Every method of every route that the app has for programs; `tests/pages` has those of the pages."""
    contexts = list(iter_route_contexts(app_of(store).router.routes))
    assert all(context.methods for context in contexts), "a route that is no HTTP: does the guard know of it?"
    return sorted(
        {
            Way(method, context.path)
            for context in contexts
            if not is_page(context.path)
            for method in context.methods or ()
        }
    )
