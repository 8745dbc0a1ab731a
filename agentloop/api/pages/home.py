"""The first page: what needs attention, then the latest runs."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from agentloop.api.pages.site import PageSite


def home_routes(site: PageSite) -> APIRouter:
    """The page."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    def home(request: Request) -> Response:
        return site.draw(request, "home.html.j2")

    return routes
