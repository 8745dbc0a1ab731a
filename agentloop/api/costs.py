"""The route of costs: sums over stored traces."""

from __future__ import annotations

from fastapi import APIRouter

from agentloop.api.parameters import Filter, Project
from agentloop.store.cost_sums import CostBy
from agentloop.store.store import Store
from agentloop.views.cost_table import CostTable, cost_table


def cost_routes(store: Store) -> APIRouter:
    """The route over `store`."""
    routes = APIRouter()

    @routes.get("/costs")
    def show_costs(project: Project, filter: Filter = "", by: CostBy = "version") -> CostTable:
        """Tokens and money of traces by version, task, model or day, as recorded with the answers of models."""
        return cost_table(store, filter, project=project, by=by)

    return routes
