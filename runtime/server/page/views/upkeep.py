"""Verify the store and free what no model uses.

Only with a key, or where a store is looked at on this machine alone (`zoo ui` on a loopback address): a server without
a key takes requests from any program that reaches it.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from runtime.frontend.errors import RequestError
from runtime.server.openai.responses import reply
from runtime.server.page.context import PageContext
from runtime.server.page.rendering import explained, html
from runtime.server.page.sessions import require_header
from runtime.server.page.upkeep_job import Work


class UpkeepViews:
    """The handlers of the store's upkeep."""

    def __init__(self, context: PageContext) -> None:
        self.context = context

    @explained(lambda views: views.context.frame)
    async def show(self, request: Request) -> Response:
        """Verify the store, and free what no model uses: what runs, and what was found last."""
        return await self._page("upkeep.html")

    @explained(lambda views: views.context.frame)
    async def state(self, request: Request) -> Response:
        """What runs, and what was found last: the part of the view that changes."""
        return await self._page("upkeep_state.html")

    async def verify(self, request: Request) -> Response:
        """Begin to re-hash the whole store."""
        return self._begun(request, "verify")

    async def collect(self, request: Request) -> Response:
        """Begin to remove the stored bytes that no model uses; `?dry_run=1` counts them only."""
        return self._begun(request, "count" if request.query_params.get("dry_run") == "1" else "gc")

    async def _page(self, template: str) -> Response:
        frame, job, allowed = self.context.frame, self.context.upkeep.state, self.context.keeps
        return await self.context.reads.apart(lambda: html(template, frame, job=job, allowed=allowed))

    def _begun(self, request: Request, work: Work) -> Response:
        require_header(request)
        if not self.context.keeps:
            raise RequestError(
                "This needs a server with --api-key, or `zoo ui` on the store.", status=403, code="key_needed"
            )
        self.context.upkeep.start(work)
        return reply({"started": work}, 202)
