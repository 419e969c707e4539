"""Build the FastAPI application: its routes, its error handlers and the API-key middleware.

All errors are answered in OpenAI's format. FastAPI's own `/docs` and `/openapi.json` are off: they know nothing of
bodies that the routes parse themselves (`openai.openapi` does).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.routing import Route

from runtime.config import ServerConfig
from runtime.frontend.apis.embeddings import EmbeddingBody
from runtime.frontend.apis.messages import MessageBody
from runtime.frontend.apis.responses import ResponseBody
from runtime.frontend.schemas import ChatBody, CompletionBody
from runtime.frontend.served_models import ServedModel, ServedModels, StoredModel
from runtime.queueing.database import QueueDatabase
from runtime.server.aliases.follower import AliasFollower
from runtime.server.aliases.routes import AliasRoutes
from runtime.server.answers.response_routes import ResponseRoutes
from runtime.server.auth import Guard
from runtime.server.batches.batch_service import BatchService
from runtime.server.batches.routes import BatchRoutes
from runtime.server.completions import Generate
from runtime.server.context import Service, make_service
from runtime.server.durable.routes import durable_routes
from runtime.server.durable.runs import DurableRuns
from runtime.server.inputs.tokens import token_routes
from runtime.server.interfaces import Driver, ModelSource
from runtime.server.membership import Membership
from runtime.server.openai.openapi import describe
from runtime.server.openai.responses import handle
from runtime.server.page.context import PageContext, page_context
from runtime.server.page.routes import page_routes
from runtime.server.page.views.reference import ReferenceView
from runtime.server.routes import ZooRoutes
from runtime.tracing.sink import Trace
from zoo.errors import ZooError
from zoo.store import Store


def build_app(
    driver: Driver,
    models: Iterable[ServedModel],
    source: ModelSource,
    config: ServerConfig,
    trace: Trace | None = None,
    on_demand: Iterable[StoredModel] = (),
    queue: QueueDatabase | None = None,
    store: Store | None = None,
) -> FastAPI:
    """Return the application over a driver that already runs.

    Args:
        on_demand: Models served once a request names them.
        queue: Where durable requests are kept.
        store: What the page shows, and where aliases are; without one there is neither.

    `app.state.service` is the `Service` that the routes share, and `app.state.park` puts durable requests down for the
    next server. The caller owns the driver and the queue and closes them.
    """
    service = make_service(driver, ServedModels(models, on_demand), source, config, trace, queue, store)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=_lifespan)
    app.state.service, app.state.gate, app.state.park = service, service.gate, partial(_park, app)
    app.state.batches = batches = BatchRoutes(service)
    app.state.page = page = None if store is None else page_context(store, config.api_key, service)
    app.state.aliases = aliases = None if store is None else AliasFollower(service, store)
    app.router.routes.extend(routes_of(service, batches, page, aliases))
    for kind in (ZooError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)
    sessions = None if page is None else page.sessions
    app.add_middleware(Guard, api_key=config.api_key, sessions=sessions, keys=service.keys)
    return app


def routes_of(
    service: Service, batches: BatchRoutes, page: PageContext | None, aliases: AliasFollower | None
) -> list[Route]:
    """Return every route of the server."""
    routes = ZooRoutes(service)
    # Names may hold slashes ("meta-llama/Llama-2-7b"), so they take the rest of the path.
    found: list[Route] = []
    found += [
        Route("/v1/completions", Generate(service, CompletionBody), methods=["POST"]),
        Route("/v1/chat/completions", Generate(service, ChatBody), methods=["POST"]),
        Route("/v1/models", routes.list_models, methods=["GET"]),
        Route("/v1/models/{name:path}", routes.show_model, methods=["GET"]),
        Route("/v1/responses", Generate(service, ResponseBody), methods=["POST"]),
        Route("/v1/embeddings", Generate(service, EmbeddingBody), methods=["POST"]),
        Route("/v1/messages", Generate(service, MessageBody), methods=["POST"]),
        *ResponseRoutes(service).routes(),
        *token_routes(service),
        *_batch_routes(batches),
        Route("/openapi.json", describe(found), methods=["GET"]),
        Route("/health", routes.health, methods=["GET"]),
        Route("/live", routes.live, methods=["GET"]),
        Route("/metrics", routes.metrics, methods=["GET"]),
        *AliasRoutes(aliases, service.config.api_key is not None).routes(),
        Route("/zoo/models", routes.zoo_models, methods=["GET"]),
        Route("/zoo/state", routes.zoo_state, methods=["GET"]),
        Route("/zoo/ledger", routes.zoo_ledger, methods=["GET"]),
        Route("/zoo/roles", routes.set_roles, methods=["POST"]),
        Route("/zoo/trace", routes.zoo_trace, methods=["GET"]),
        Route("/zoo/requests/{id}/pause", routes.pause, methods=["POST"]),
        Route("/zoo/requests/{id}/resume", routes.resume, methods=["POST"]),
        *durable_routes(service),
        Route("/zoo/models/{name:path}/load", routes.load, methods=["POST"]),
        Route("/zoo/models/{name:path}/unload", routes.unload, methods=["POST"]),
        *([] if page is None else [*page_routes(page), *ReferenceView(page, found).routes()]),
    ]
    return found


def _batch_routes(routes: BatchRoutes) -> list[Route]:
    return [
        Route("/v1/files", routes.upload, methods=["POST"]),
        Route("/v1/files", routes.list_files, methods=["GET"]),
        Route("/v1/files/{id}", routes.show_file, methods=["GET"]),
        Route("/v1/files/{id}", routes.delete_file, methods=["DELETE"]),
        Route("/v1/files/{id}/content", routes.file_content, methods=["GET"]),
        Route("/v1/batches", routes.create_batch, methods=["POST"]),
        Route("/v1/batches", routes.list_batches, methods=["GET"]),
        Route("/v1/batches/{id}", routes.show_batch, methods=["GET"]),
        Route("/v1/batches/{id}/cancel", routes.cancel_batch, methods=["POST"]),
    ]


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    async with AsyncExitStack() as stack:
        if service.keys is not None:
            await service.keys.open()
            stack.push_async_callback(service.keys.close)
        if app.state.aliases is not None:  # before the queue: its requests may name them
            await app.state.aliases.open()
            stack.push_async_callback(app.state.aliases.close)
        if service.background is not None:
            stack.push_async_callback(service.background.close)
        if service.durable is not None:
            await service.durable.open()
            stack.push_async_callback(service.durable.close)
            app.state.batches.batches = batches = await _start_batches(service, service.durable, stack)
            app.state.membership = membership = Membership(service.durable.store.database, service.durable, batches)
            membership.start()
            stack.push_async_callback(membership.stop)
        yield
    if app.state.page is not None:
        app.state.page.close()
    app.state.service.workers.shutdown(wait=False, cancel_futures=True)
    app.state.service.grammars.close()


async def _park(app: FastAPI) -> None:
    service: Service = app.state.service
    batches: BatchService | None = app.state.batches.batches
    if batches is not None:
        await app.state.membership.stop()
        await batches.stop()
    if service.durable is not None:
        await service.durable.park()


async def _start_batches(service: Service, durable: DurableRuns, stack: AsyncExitStack) -> BatchService:
    store = durable.store
    seats, gate = service.config.max_num_seqs, service.gate
    batches = BatchService(
        service, store.database, store.journal, durable, seats, lambda: gate.requests > 0 or durable.interactive
    )
    await batches.start()
    stack.push_async_callback(batches.stop)
    return batches
