"""The views of the catalogue: the list of models, their lineage, and one model with its chain.

All work without JavaScript. Reading and rendering are done on the page's own threads.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from runtime.server.page.context import PageContext
from runtime.server.page.drawing.lineage import lineage_svg
from runtime.server.page.drawing.strip import strip_svg
from runtime.server.page.listing import listed, wanted
from runtime.server.page.model_view import aliases_by_model, model_view
from runtime.server.page.rendering import Frame, explained, html, static
from zoo.catalog import Reader

#: Models that one drawing of the lineage has at most.
MOST_DRAWN = 2000


def _frame(views: CatalogueViews) -> Frame:
    return views.context.frame


class CatalogueViews:
    """The handlers that `routes.page_routes` registers."""

    def __init__(self, context: PageContext) -> None:
        self.context = context

    @explained(_frame)
    async def models(self, request: Request) -> Response:
        """The zoo's page: all stored models with their sizes, and the bytes that sharing saves."""
        asked = wanted(request.query_params)
        served = self._served()

        def read(reader: Reader) -> Response:
            overview = self.context.reads.overview(reader)
            shown = listed(overview.models, asked)
            aliases = aliases_by_model(reader)
            return html(
                "models.html", _frame(self), overview=overview, shown=shown, asked=asked, served=served, aliases=aliases
            )

        return await self.context.reads.run(read)

    @explained(_frame)
    async def lineage(self, request: Request) -> Response:
        """Which model was made from which, as a tree."""

        def read(reader: Reader) -> Response:
            models = reader.entries()
            drawing = lineage_svg(models[:MOST_DRAWN])
            return html("lineage.html", _frame(self), drawing=drawing, count=len(models), most=MOST_DRAWN)

        return await self.context.reads.run(read)

    @explained(_frame)
    async def model(self, request: Request) -> Response:
        """One model: its chain as a strip of components, coloured by the models that share them."""
        name = request.path_params["name"]
        served = self._served()

        def read(reader: Reader) -> Response:
            view = model_view(reader, name)
            drawing = strip_svg(view.parts, f"Components of {view.manifest.name}")
            sizes = {model.name: model for model in self.context.reads.overview(reader).models}
            own = sizes[view.manifest.name].bytes_own if view.manifest.name in sizes else 0
            return html("model.html", _frame(self), view=view, drawing=drawing, bytes_own=own, served=served)

        return await self.context.reads.run(read)

    async def style(self, request: Request) -> Response:
        """The page's style sheet."""
        return static("zoo.css")

    async def icon(self, request: Request) -> Response:
        """The page's icon."""
        return static("icon.svg")

    def _served(self) -> frozenset[str]:
        """Return the names of the models that are served now."""
        service = self.context.service
        return frozenset() if service is None else frozenset(model.name for model in service.models.all())
