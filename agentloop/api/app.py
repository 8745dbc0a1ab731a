"""The trace service: what `agentloop serve` runs.

Guard (auth.py)  ->  POST /v1/traces, /v1/logs (ingest.py)  ->  Committer  ->  Store
                 ->  /api/v1/... (query.py)                                ->  Store
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from agentloop import __version__
from agentloop.api.auth import Guard
from agentloop.api.committer import Committer
from agentloop.api.ingest import Ingest
from agentloop.api.query import router
from agentloop.errors import AgentLoopError, ConfigError, NoSuchTrace, StateError, StoreError
from agentloop.store.store import Store

RETRY_S = 5
"""Retry-After, when the store fails."""


def make_app(store: Store) -> ASGIApp:
    """The service over `store`, which stays the caller's to close."""
    committer = Committer(store.put_spans)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        committer.close()

    app = FastAPI(title="agentloop", version=__version__, lifespan=lifespan, redoc_url=None)
    ingest = Ingest(committer)
    app.router.routes.append(Route("/v1/traces", ingest.traces, methods=["POST"]))
    app.router.routes.append(Route("/v1/logs", ingest.logs, methods=["POST"]))
    app.include_router(router(store))
    app.add_exception_handler(AgentLoopError, _explained)
    _add_health(app, store, committer)
    return Guard(app, store)


def _add_health(app: FastAPI, store: Store, committer: Committer) -> None:
    registry = CollectorRegistry()
    commits = Counter("agentloop_commits", "Transactions that wrote spans.", registry=registry)
    waiting = Gauge("agentloop_waiting_bytes", "Bytes of spans that wait for a commit.", registry=registry)
    size = Gauge("agentloop_store_bytes", "Bytes that the store uses.", registry=registry)

    @app.get("/healthz", include_in_schema=False)
    def healthy() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    @app.get("/readyz", include_in_schema=False)
    def ready() -> Response:
        try:
            store.check()
        except StoreError as error:
            return PlainTextResponse(f"{error}\n", 503, {"Retry-After": str(RETRY_S)})
        return PlainTextResponse("ok\n")

    @app.get("/metrics", include_in_schema=False)
    def metrics() -> PlainTextResponse:
        commits.inc(committer.n_commits - commits._value.get())  # the committer counts; this only tells
        waiting.set(committer.n_waiting_bytes)
        size.set(store.size())
        return PlainTextResponse(generate_latest(registry).decode(), media_type="text/plain; version=0.0.4")


def _explained(_: Request, error: Exception) -> JSONResponse:
    """One line, and a status that says whose turn it is."""
    if isinstance(error, NoSuchTrace):
        code = 404
    elif isinstance(error, ConfigError):
        code = 400
    elif isinstance(error, StateError):
        code = 409
    elif isinstance(error, StoreError):
        return JSONResponse({"error": str(error)}, 503, {"Retry-After": str(RETRY_S)})
    else:
        code = 500
    return JSONResponse({"error": str(error)}, code)
