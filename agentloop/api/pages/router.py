"""All pages of a site."""

from __future__ import annotations

from fastapi import APIRouter

from agentloop.api.pages.assets import asset_routes
from agentloop.api.pages.compare import compare_routes
from agentloop.api.pages.costs import cost_pages
from agentloop.api.pages.documentation import documentation_pages
from agentloop.api.pages.failures import failure_pages
from agentloop.api.pages.gates import gate_pages
from agentloop.api.pages.home import home_pages
from agentloop.api.pages.review import review_pages
from agentloop.api.pages.runs import run_pages
from agentloop.api.pages.sharing import sharing_pages
from agentloop.api.pages.signing_in import enter_routes, sign_in_routes
from agentloop.api.pages.site import PageSite
from agentloop.api.pages.tasks import task_pages
from agentloop.api.pages.trace import trace_page_routes
from agentloop.api.pages.trace_links import trace_link_routes
from agentloop.api.pages.trace_list import trace_list_pages
from agentloop.api.pages.versions import version_pages
from agentloop.api.pages.work import work_pages
from agentloop.api.sessions import BrowserSessions

PAGES = (
    home_pages,
    trace_list_pages,
    trace_page_routes,
    trace_link_routes,
    compare_routes,
    failure_pages,
    cost_pages,
    version_pages,
    gate_pages,
    run_pages,
    task_pages,
    work_pages,
    review_pages,
    sharing_pages,
    documentation_pages,
)
"""One function a page, which makes its routes."""


def page_routes(site: PageSite, sessions: BrowserSessions) -> APIRouter:
    """The routes of all pages."""
    routes = APIRouter(include_in_schema=False)
    routes.include_router(asset_routes(site.assets))
    routes.include_router(enter_routes(site, sessions))
    routes.include_router(sign_in_routes(site, sessions))
    for page in PAGES:
        routes.include_router(page(site))
    return routes
