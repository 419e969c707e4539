"""The routes of kept responses. The docstrings of the handlers are part of `docs/http.md`."""

from __future__ import annotations

import json
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.frontend.apis.responses import ResponseBody
from runtime.frontend.errors import RequestError
from runtime.queueing import requests
from runtime.queueing.records import ENDED, DurableRequest
from runtime.server.answers.kept import find_response
from runtime.server.answers.responses import input_item_document, response_frame
from runtime.server.auth import principal
from runtime.server.context import Service
from runtime.server.durable.runs import DurableRuns
from runtime.server.openai.paging import page_document, page_query
from runtime.server.openai.responses import reply

#: Items of a page.
_USUAL_ITEMS, _MOST_ITEMS = 20, 100


class ResponseRoutes:
    """The handlers of single responses."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/v1/responses/{id}", self.show, methods=["GET"]),
            Route("/v1/responses/{id}", self.remove, methods=["DELETE"]),
            Route("/v1/responses/{id}/input_items", self.show_input, methods=["GET"]),
        ]

    async def show(self, request: Request) -> Response:
        """Show a kept response: whole once it has ended, without its output before."""
        durable, found, body = await self._find(request)
        answer = await durable.store.answer(found.id) if found.state in ENDED else None
        if answer is not None and answer.status == 200:
            return Response(answer.document, media_type="application/json")
        created = found.created // 10**9
        if answer is None:
            status = "queued" if found.state == "queued" else "in_progress"
            return reply(response_frame(body, found.id, created, found.model, status))
        error = json.loads(answer.document)["error"]
        status = "cancelled" if found.state == "cancelled" else "failed"
        worded = {"code": error["code"] or "server_error", "message": error["message"]}
        return reply({**response_frame(body, found.id, created, found.model, status), "error": worded})

    async def remove(self, request: Request) -> Response:
        """Remove a kept response; one that has not ended is aborted."""
        durable, found, _ = await self._find(request)
        if found.state not in ENDED:
            await durable.cancel(found)
        await durable.store.journal.write(partial(requests.remove, request=found.id))
        return reply({"id": found.id, "object": "response", "deleted": True})

    async def show_input(self, request: Request) -> Response:
        """List what a kept response answers, with the conversation that it continues: the latest items first, or
        `?order=asc`.
        """
        _, found, body = await self._find(request)
        limit, after = page_query(request, _USUAL_ITEMS, _MOST_ITEMS)
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError("order is asc or desc", param="order")
        items = [input_item_document(found.id, at, item) for at, item in enumerate(body.items)]
        if order == "desc":
            items.reverse()
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise RequestError("There is no item of that id.", param="after")
            items = items[ids.index(after) + 1 :]
        return reply(page_document(items[:limit], len(items) > limit))

    async def _find(self, request: Request) -> tuple[DurableRuns, DurableRequest, ResponseBody]:
        durable = self._service.durable
        if durable is None:
            message = "This server keeps no responses; start it with --queue DIR."
            raise RequestError(message, status=501, code="queue_off")
        found = await find_response(self._service, durable.store, request.path_params["id"], principal(request))
        if found is None:
            message = "There is no response of that id."
            raise RequestError(message, status=404, param="id", code="response_not_found")
        return (durable, *found)
