"""Build the FastAPI application: its routes, its error handlers and the API-key middleware.

All errors are answered in OpenAI's format. FastAPI's `/docs` and `/openapi.json` are off: the interface is OpenAI's and
is described in `docs/http.md`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.routing import Route

from runtime.config import ServerConfig
from runtime.frontend.schemas import ChatBody, CompletionBody
from runtime.frontend.served_models import ServedModel, ServedModels, StoredModel
from runtime.server.auth import Guard
from runtime.server.completions import Generate
from runtime.server.context import Service, make_service
from runtime.server.interfaces import Driver, ModelSource
from runtime.server.openai.responses import handle
from runtime.server.routes import ZooRoutes
from runtime.tracing.sink import Trace
from zoo.errors import ZooError


def build_app(
    driver: Driver,
    models: Iterable[ServedModel],
    source: ModelSource,
    config: ServerConfig,
    trace: Trace | None = None,
    on_demand: Iterable[StoredModel] = (),
) -> FastAPI:
    """Return the application over a driver that already runs. `on_demand`: models served once a request names them.

    `app.state.service` is the `Service` that the routes share. The caller owns the driver and closes it.
    """
    service = make_service(driver, ServedModels(models, on_demand), source, config, trace)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=_lifespan)
    app.state.service = service
    app.router.routes.extend(routes_of(service))
    for kind in (ZooError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)
    app.add_middleware(Guard, api_key=config.api_key)
    return app


def routes_of(service: Service) -> list[Route]:
    """Return every route of the server."""
    routes = ZooRoutes(service)
    # Names may hold slashes ("meta-llama/Llama-2-7b"), so they take the rest of the path.
    return [
        Route("/v1/completions", Generate(service, CompletionBody), methods=["POST"]),
        Route("/v1/chat/completions", Generate(service, ChatBody), methods=["POST"]),
        Route("/v1/models", routes.list_models, methods=["GET"]),
        Route("/v1/models/{name:path}", routes.show_model, methods=["GET"]),
        Route("/health", routes.health, methods=["GET"]),
        Route("/live", routes.live, methods=["GET"]),
        Route("/metrics", routes.metrics, methods=["GET"]),
        Route("/zoo/models", routes.zoo_models, methods=["GET"]),
        Route("/zoo/state", routes.zoo_state, methods=["GET"]),
        Route("/zoo/trace", routes.zoo_trace, methods=["GET"]),
        Route("/zoo/requests/{id}/pause", routes.pause, methods=["POST"]),
        Route("/zoo/requests/{id}/resume", routes.resume, methods=["POST"]),
        Route("/zoo/models/{name:path}/load", routes.load, methods=["POST"]),
        Route("/zoo/models/{name:path}/unload", routes.unload, methods=["POST"]),
    ]


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    app.state.service.workers.shutdown(wait=False, cancel_futures=True)
