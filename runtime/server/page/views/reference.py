"""The HTTP interface as a page: what `/openapi.json` says, without a script or another host."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.server.openai.openapi import openapi_document
from runtime.server.page.context import PageContext
from runtime.server.page.reference import areas_of
from runtime.server.page.rendering import explained, html


class ReferenceView:
    """The handler of `/docs`.

    Args:
        routes: Those of the server, among which this one may be.
    """

    def __init__(self, context: PageContext, routes: Sequence[Route]) -> None:
        self.context = context
        self._routes = routes

    def routes(self) -> list[Route]:
        return [
            Route("/docs", self.show, methods=["GET"]),
        ]

    @explained(lambda view: view.context.frame)
    async def show(self, request: Request) -> Response:
        """This interface as a page: every route with its fields, their bounds, examples and errors."""
        frame = self.context.frame
        return await self.context.reads.apart(
            lambda: html("reference.html", frame, areas=areas_of(openapi_document(self._routes)))
        )
