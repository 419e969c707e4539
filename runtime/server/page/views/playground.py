"""The playground: one prompt to several models. The script asks the generating routes; nothing is generated here."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from runtime.server.page.context import PageContext
from runtime.server.page.listing import by_name
from runtime.server.page.rendering import explained, html

#: Models that are asked at once.
MOST_MODELS = 6


class PlaygroundViews:
    """The handler of the playground."""

    def __init__(self, context: PageContext) -> None:
        self.context = context

    @explained(lambda views: views.context.frame)
    async def show(self, request: Request) -> Response:
        """One prompt to several models, with the speed of each answer and the model that gave it."""
        service = self.context.service
        names: list[str] = []
        if service is not None:
            served, waiting = service.models.all(), service.models.on_demand()
            known = {model.name for model in served} | {model.name for model in waiting}
            names = sorted(known | {alias.name for alias in service.models.aliases()}, key=by_name)
        asked = set(request.query_params.getlist("model")[:MOST_MODELS]) or set(names[:2])
        frame = self.context.frame
        return await self.context.reads.apart(
            lambda: html("playground.html", frame, names=names, chosen=asked, most=MOST_MODELS)
        )
