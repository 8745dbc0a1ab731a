"""All pages of a site."""

from __future__ import annotations

from fastapi import APIRouter

from agentloop.api.pages.assets import asset_routes
from agentloop.api.pages.compare import compare_routes
from agentloop.api.pages.home import home_routes
from agentloop.api.pages.signing_in import sign_in_routes
from agentloop.api.pages.site import PageSite
from agentloop.api.pages.trace import trace_page_routes
from agentloop.api.pages.trace_links import trace_link_routes
from agentloop.api.sessions import BrowserSessions

PAGES = (home_routes, trace_page_routes, trace_link_routes, compare_routes)
"""One function a page, which makes its routes."""


def page_routes(site: PageSite, sessions: BrowserSessions) -> APIRouter:
    """The routes of all pages."""
    routes = APIRouter(include_in_schema=False)
    routes.include_router(asset_routes(site.assets))
    routes.include_router(sign_in_routes(site, sessions))
    for page in PAGES:
        routes.include_router(page(site))
    return routes
