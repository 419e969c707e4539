"""The ASGI endpoint of routes that read a body, as the generating routes do, and answer at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.frontend.schemas import B, parse
from runtime.server.auth import client_key
from runtime.server.context import Service
from runtime.server.model_choice import check_model
from runtime.server.openai.responses import dump
from runtime.server.request_body import read_body, while_connected
from runtime.server.request_runner import when_served
from zoo.records import ClientKey


class Reading(Generic[B]):
    """The application of one route: its type of body, and what makes the answer's document from it.

    The body's bounds, the places of the server and models that are served on demand are those of the generating routes.

    Args:
        work: Called on a worker thread; its docstring describes the route.
    """

    def __init__(self, service: Service, kind: type[B], work: Callable[[Service, B], object]) -> None:
        self._service = service
        self._work = work
        self.body = kind
        self.summary = str(work.__doc__)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            with self._service.gate.place() as place:
                raw = await read_body(request, self._service.config.max_body_bytes)
                place.count_request()
                async with while_connected(receive):
                    document = await when_served(self._service, partial(self._answer, raw, client_key(request)))
                    await Response(document, media_type="application/json")(scope, receive, send)
        except ClientDisconnect:
            return

    def _answer(self, raw: bytes, key: ClientKey | None) -> bytes:
        body = parse(self.body, raw)
        if key is not None:
            check_model(self._service, str(getattr(body, "model", "")), key)
        return dump(self._work(self._service, body))
