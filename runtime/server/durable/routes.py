"""The routes of durable requests. The docstrings of the handlers are part of `docs/http.md`."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from runtime.frontend.errors import RequestError
from runtime.queueing import requests
from runtime.queueing.records import ENDED, DurableRequest
from runtime.server.answers.forms import form_of_kind
from runtime.server.auth import principal
from runtime.server.context import Service
from runtime.server.durable.answering import last_event, run_to_follow, write_run
from runtime.server.durable.run import unknown_request
from runtime.server.durable.runs import DurableRuns
from runtime.server.openai.responses import reply
from runtime.server.request_body import while_connected


def durable_routes(service: Service) -> list[Route]:
    """Return the routes of a server with a queue, none without one."""
    if service.durable is None:
        return []
    routes = DurableRoutes(service, service.durable)
    return [
        Route("/zoo/requests/{id}", routes.show, methods=["GET"]),
        Route("/zoo/requests/{id}", routes.abort, methods=["DELETE"]),
        Route("/zoo/requests/{id}/events", RequestEvents(service, service.durable), methods=["GET"]),
    ]


class DurableRoutes:
    """The handlers of single durable requests."""

    def __init__(self, service: Service, durable: DurableRuns) -> None:
        self._service = service
        self._durable = durable

    async def show(self, request: Request) -> Response:
        """State of a durable request, and its answer once it has ended."""
        return await self._reply(await _find(self._service, self._durable, request))

    async def abort(self, request: Request) -> Response:
        """Abort a durable request: unless it has ended, it ends with an error."""
        found = await _find(self._service, self._durable, request)
        if found.batch is not None:
            message = "This request is a line of a batch, and ends with it: cancel the batch."
            raise RequestError(message, status=409, param="id", code="line_of_batch")
        if found.state not in ENDED:
            await self._durable.cancel(found)
        return await self._reply(await _find(self._service, self._durable, request))

    async def _reply(self, found: DurableRequest) -> Response:
        answer = await self._durable.store.answer(found.id) if found.state in ENDED else None
        document: dict[str, Any] = {
            "id": found.id,
            "state": found.state,
            "model": found.model,
            "created": found.created // 10**9,
            "ended": None if found.ended is None else found.ended // 10**9,
            "attempts": found.attempts,
            "batch": found.batch,
            "status": found.status,
            "answer": None if answer is None else json.loads(answer.document),
        }
        return reply(document)


class RequestEvents:
    """Server-sent events of a durable request, from the first one on, until it ends. Of a request without `stream`: the
    answer, once it has ended.
    """

    def __init__(self, service: Service, durable: DurableRuns) -> None:
        self._service = service
        self._durable = durable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        found, number = await _find(self._service, self._durable, request), last_event(request)
        run = await run_to_follow(self._durable, found)
        try:
            async with while_connected(receive):
                await write_run(form_of_kind(found.kind), run, number, scope, receive, send)
        except ClientDisconnect:
            return


async def _find(service: Service, durable: DurableRuns, request: Request) -> DurableRequest:
    """Return the request that a route names. Raises RequestError 404, also for another principal's request."""
    name = request.path_params["id"]
    found = await durable.store.read(partial(requests.get, request=name))
    if found is None or found.principal != principal(request):
        raise unknown_request()
    return found
