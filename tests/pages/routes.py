"""The routes of the pages, read from the app itself, so that no test forgets a new one."""

from __future__ import annotations

from typing import NamedTuple

from api.routes import app_of
from fastapi.routing import iter_route_contexts

from agentloop.api.pages.paths import is_page
from agentloop.store.store import Store

FILLED = {"token": "x", "name": "x", "version": "1"}
"""Values of parameters that are neither an id of a trace nor a number."""


class PageRoute(NamedTuple):
    """A method of a page."""

    method: str
    template: str

    def path(self, trace_id: str) -> str:
        """The path with every parameter filled."""
        parts = self.template.replace(":path}", "}").split("/")
        move = "promote" if self.template.startswith("/versions/") else "retry"
        return "/".join(move if part == "{move}" else _filled(part, trace_id) for part in parts)


def _filled(part: str, trace_id: str) -> str:
    if not part.startswith("{"):
        return part
    name = part.strip("{}").partition(":")[0]
    if "trace" in name:
        return trace_id
    return FILLED.get(name, "1")


def page_routes_of(store: Store) -> list[PageRoute]:
    """Every method of every page."""
    contexts = iter_route_contexts(app_of(store).router.routes)
    return sorted(
        {
            PageRoute(method, context.path)
            for context in contexts
            if context.path is not None and is_page(context.path)
            for method in context.methods or ()
        }
    )
