"""The routes of kept responses. The docstrings of the handlers are part of `docs/http.md`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from runtime.frontend.errors import RequestError
from runtime.queueing import requests
from runtime.queueing.records import ENDED, DurableRequest
from runtime.server.answers.background import BackgroundRun
from runtime.server.answers.forms import form_of_kind
from runtime.server.answers.kept import KeptResponse, find_response, kept_now
from runtime.server.answers.responses import input_item_document
from runtime.server.auth import principal
from runtime.server.context import Service
from runtime.server.durable.answering import run_to_follow, write_run
from runtime.server.durable.run import DurableRun
from runtime.server.durable.runs import DurableRuns
from runtime.server.openai.paging import page_document, page_query
from runtime.server.openai.responses import reply
from runtime.server.request_body import while_connected

#: Items of a page.
_USUAL_ITEMS, _MOST_ITEMS = 20, 100
#: Digits of an event's number.
_MOST_DIGITS = 9


@dataclass(frozen=True, slots=True)
class FoundResponse:
    """A kept response, in the queue or in memory, and what can be done with it.

    Fields:
        now: What it is now.
        run: Returns what can be followed of it.
        cancel, remove: Stop it unless it has ended; remove, too.
    """

    now: KeptResponse
    run: Callable[[], Awaitable[DurableRun]]
    cancel: Callable[[], Awaitable[None]]
    remove: Callable[[], Awaitable[None]]


class ShowResponse:
    """Show a kept response: whole once it has ended, without its output before. With `?stream=true` its events, from
    the first one on, or behind one that has been seen.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        found, seen = await _find(self._service, request), _seen_events(request)
        if seen is None:
            await _shown(found.now)(scope, receive, send)
            return
        if not found.now.body.stream:
            raise RequestError("This response was not asked for as a stream.", param="stream", code="no_stream")
        run = await found.run()
        try:
            async with while_connected(receive):
                await write_run(form_of_kind("response"), run, -1, scope, receive, send, seen)
        except ClientDisconnect:
            return


class ResponseRoutes:
    """The handlers of single responses."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/v1/responses/{id}", ShowResponse(self._service), methods=["GET"]),
            Route("/v1/responses/{id}", self.remove, methods=["DELETE"]),
            Route("/v1/responses/{id}/cancel", self.cancel, methods=["POST"]),
            Route("/v1/responses/{id}/input_items", self.show_input, methods=["GET"]),
        ]

    async def cancel(self, request: Request) -> Response:
        """Stop a response that runs in the background; one that has ended stays as it is."""
        found = await _find(self._service, request)
        if not found.now.body.background:
            message = "Only a response that was asked for with `background` can be cancelled; DELETE removes any."
            raise RequestError(message, param="id", code="not_in_background")
        if found.now.answer is None:
            await found.cancel()
            found = await _find(self._service, request)
        return _shown(found.now)

    async def remove(self, request: Request) -> Response:
        """Remove a kept response; one that has not ended is aborted."""
        found = await _find(self._service, request)
        await found.remove()
        return reply({"id": found.now.id, "object": "response", "deleted": True})

    async def show_input(self, request: Request) -> Response:
        """List what a kept response answers, with the conversation that it continues: the latest items first, or
        `?order=asc`.
        """
        found = (await _find(self._service, request)).now
        limit, after = page_query(request, _USUAL_ITEMS, _MOST_ITEMS)
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError("order is asc or desc", param="order")
        items = [input_item_document(found.id, at, item) for at, item in enumerate(found.body.items)]
        if order == "desc":
            items.reverse()
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise RequestError("There is no item of that id.", param="after")
            items = items[ids.index(after) + 1 :]
        return reply(page_document(items[:limit], len(items) > limit))


async def _find(service: Service, request: Request) -> FoundResponse:
    """Return the response that a route names.

    Raises RequestError 404 or 501 where there is none, or it is another principal's; StoreError.
    """
    name, owner, durable = request.path_params["id"], principal(request), service.durable
    if durable is None:
        kept = None if service.background is None else service.background.find(name, owner)
        if kept is None:
            message = "Without a queue only responses that run in the background are kept; start it with --queue DIR."
            raise RequestError(message, status=501, code="queue_off")
        return FoundResponse(kept.now(), partial(_run_of, kept), kept.cancel, partial(_drop, service, kept))
    found = await find_response(service, durable.store, name, owner)
    if found is None:
        message = "There is no response of that id."
        raise RequestError(message, status=404, param="id", code="response_not_found")
    stored, body = found
    return FoundResponse(
        await kept_now(durable.store, stored, body),
        partial(run_to_follow, durable, stored),
        partial(durable.cancel, stored),
        partial(_remove_stored, durable, stored),
    )


async def _run_of(kept: BackgroundRun) -> DurableRun:
    return kept.run


async def _drop(service: Service, kept: BackgroundRun) -> None:
    if service.background is not None:
        await service.background.remove(kept)


async def _remove_stored(durable: DurableRuns, found: DurableRequest) -> None:
    if found.state not in ENDED:
        await durable.cancel(found)
    await durable.store.journal.write(partial(requests.remove, request=found.id))


def _shown(found: KeptResponse) -> Response:
    return Response(found.document(), media_type="application/json")


def _seen_events(request: Request) -> int | None:
    """Return how many events of a stream the client has seen, None if it asks for no stream. Raises RequestError."""
    wanted = request.query_params.get("stream", "false")
    after = request.query_params.get("starting_after")
    if wanted not in ("true", "false"):
        raise RequestError("stream is true or false", param="stream")
    if after is not None and not (after.isascii() and after.isdigit() and len(after) <= _MOST_DIGITS):
        raise RequestError("starting_after is the number of an event", param="starting_after")
    if wanted == "false":
        if after is not None:
            raise RequestError("starting_after needs stream=true", param="starting_after")
        return None
    return 0 if after is None else int(after) + 1
